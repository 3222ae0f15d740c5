"""The picture of a step as a page: a row for the host and for each stream, and where the device waits.

A column of the picture has the color of the kind of work that takes most of it, and is the paler the less of it is busy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pipeline.common import page
from pipeline.common.charts import ticks
from pipeline.common.intervals import Interval

#: Kinds of work, and their colors, which can be told apart with any color vision (Okabe and Ito 2008).
PRODUCTS, ATTENTION, OTHER, COPIES, HOST_WAITS = "matrix products", "attention", "other kernels", "copies", "waits of the host"
COLORS = {PRODUCTS: "#0072b2", ATTENTION: "#56b4e9", OTHER: "#8a949e", COPIES: "#f0e442", HOST_WAITS: "#1d2329"}
EXPOSED, LATE = "exposed communication", "the device waits for the host"
WAITS = {EXPOSED: "#f4a79a", LATE: "#cfd5da"}
#: A kind of work that begins so is that of collectives over an axis.
COLLECTIVES = "collectives: "
AXES = {"data": "#009e73", "dense": "#009e73", "tensor": "#d55e00", "pipeline": "#cc79a7", "context": "#e69f00", "expert": "#9467bd"}
_OTHER_AXIS = "#8c564b"
#: Places in the picture, pixels.
WIDTH, LEFT, ROW, GAP, TOP = 1200, 190, 26, 8, 20
#: Part of the step that the second picture shows.
_DETAIL = 0.04


@dataclass(frozen=True)
class WorkBar:
    """Some work of a row: place, width, color, opacity and text."""

    x: str
    width: str
    color: str
    opacity: str
    title: str


@dataclass(frozen=True)
class Row:
    """A row of the picture: its name, its place and its bars."""

    name: str
    y: int
    bars: list[WorkBar]


@dataclass(frozen=True)
class Picture:
    """A part of the step.

    Attributes:
        title: above the picture.
        rows: host, then streams.
        exposed, late: where the device waits for a collective, and for the host.
        x_ticks: (place, label in milliseconds since the begin of the step).
        height: pixels.
    """

    title: str
    rows: list[Row]
    exposed: list[WorkBar]
    late: list[WorkBar]
    x_ticks: list[tuple[str, str]]
    height: int
    width: int = WIDTH
    left: int = LEFT
    row: int = ROW
    top: int = TOP


@dataclass(frozen=True)
class Span:
    """Some work: its kind, when it ran, seconds, and what is said of it."""

    kind: str
    begin: float
    end: float
    text: str


@dataclass(frozen=True)
class Step:
    """What a picture shows.

    Attributes:
        window: begin and end of the step, seconds.
        rows: name -> its work, from the top down.
        exposed, late: when the device waits for a collective, and for the host.
    """

    window: Interval
    rows: Sequence[tuple[str, Sequence[Span]]]
    exposed: Sequence[Interval]
    late: Sequence[Interval]

    def html(self, title: str, lines: Iterable[str]) -> str:
        """Return the page: the whole step, a part of it, and lines of text."""
        first, end = self.window
        begin, until = self._detail()
        pictures = [self.picture("The whole step", first, end)]
        if until - begin < end - first:
            where = "the longest exposed communication" if self.exposed else "the middle"
            pictures.append(self.picture(f"{1e3 * (begin - first):,.1f} to {1e3 * (until - first):,.1f} ms: {where}", begin, until))
        used = {span.kind for _, spans in self.rows for span in spans if span.begin < end and span.end > first}
        legend = [(_color(kind), kind) for kind in (*COLORS, *sorted(used - {*COLORS})) if kind in used]
        legend += [(WAITS[kind], kind) for kind, intervals in ((EXPOSED, self.exposed), (LATE, self.late)) if intervals]
        return page.render("timeline.html.jinja", title, pictures=pictures, legend=legend, lines=list(lines))

    def picture(self, title: str, begin: float, end: float) -> Picture:
        """Return the picture of the part of the step from `begin` up to `end`, seconds."""
        start = self.window[0]
        rows = [
            Row(name, TOP + number * (ROW + GAP), list(_bars(spans, begin, end, start))) for number, (name, spans) in enumerate(self.rows)
        ]
        places = ticks([1e3 * (begin - start), 1e3 * (end - start)], about=8)
        at = [(start + place / 1e3, f"{place:,g}") for place in places]
        return Picture(
            title,
            rows,
            list(_bars([Span(EXPOSED, *interval, EXPOSED) for interval in self.exposed], begin, end, start)),
            list(_bars([Span(LATE, *interval, LATE) for interval in self.late], begin, end, start)),
            [(f"{_x(time, begin, end):.1f}", label) for time, label in at if begin <= time <= end],
            TOP + len(rows) * (ROW + GAP) + 36,
        )

    def _detail(self) -> Interval:
        """The part of the second picture: around the longest exposed communication, or else in the middle."""
        opens, closes = self.window
        middle = (opens + closes) / 2
        begin, end = max(self.exposed, key=lambda pair: pair[1] - pair[0], default=(middle, middle))
        width = min(closes - opens, max(_DETAIL * (closes - opens), 2 * (end - begin)))
        first = min(max(opens, (begin + end - width) / 2), closes - width)
        return first, first + width


def _color(kind: str) -> str:
    """The color of a kind of work."""
    return COLORS.get(kind) or WAITS.get(kind) or AXES.get(kind.removeprefix(COLLECTIVES), _OTHER_AXIS)


def _x(time: float, begin: float, end: float) -> float:
    """The place of a time."""
    return LEFT + (time - begin) / (end - begin) * (WIDTH - LEFT - 10) if end > begin else LEFT


def _bars(spans: Sequence[Span], begin: float, end: float, start: float) -> Iterator[WorkBar]:
    """Bars of a row: each column has the kind that takes most of it, and neighbors that look alike are one bar."""
    columns: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    longest: dict[int, Span] = {}
    for span in spans:
        first, last = (_x(min(max(time, begin), end), begin, end) for time in (span.begin, span.end))
        if span.begin >= end or span.end <= begin:
            continue
        column = int(first)
        while column < last:
            columns[column][span.kind] += min(last, column + 1) - max(first, column)
            if column not in longest or span.end - span.begin > longest[column].end - longest[column].begin:
                longest[column] = span
            column += 1
    run: tuple[int, int, tuple[str, str], Span] | None = None
    for column in sorted(columns):
        busy = sum(columns[column].values())
        look = max(columns[column], key=lambda kind: columns[column][kind]), f"{max(1, min(4, round(4 * busy))) / 4:g}"
        if run is not None and run[1] == column and run[2] == look:
            text = max(run[3], longest[column], key=lambda span: span.end - span.begin)
            run = run[0], column + 1, look, text
            continue
        if run is not None:
            yield _bar(run, start)
        run = column, column + 1, look, longest[column]
    if run is not None:
        yield _bar(run, start)


def _bar(run: tuple[int, int, tuple[str, str], Span], start: float) -> WorkBar:
    """A run of columns as a bar, which names the longest work in it."""
    first, last, (kind, opacity), span = run
    text = f"{span.text}: {1e3 * (span.begin - start):,.3f} to {1e3 * (span.end - start):,.3f} ms"
    return WorkBar(str(first), str(last - first), _color(kind), opacity, text)
