"""The picture of a replayed step, as a page and as a Chrome trace: a row for the host and for each stream, and where the device waits.

A column of the picture has the color of the kind of work that takes most of it, and is the paler the less of it is busy.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common import page
from pipeline.common.atomic_files import atomic_file
from pipeline.common.charts import ticks
from pipeline.common.intervals import Interval
from pipeline.rehearsal.analysis import Findings
from pipeline.rehearsal.replay import Placed

#: Colors of kinds of work, which can be told apart with any color vision (Okabe and Ito 2008).
COLORS = {
    "matrix products": "#0072b2",
    "attention": "#56b4e9",
    "other kernels": "#8a949e",
    "copies": "#f0e442",
    "waits of the host": "#1d2329",
}
EXPOSED, LATE = "exposed communication", "the device waits for the host"
WAITS = {EXPOSED: "#f4a79a", LATE: "#cfd5da"}
#: Colors of collectives, by axis.
AXES = {"data": "#009e73", "dense": "#009e73", "tensor": "#d55e00", "pipeline": "#cc79a7", "context": "#e69f00", "expert": "#9467bd"}
_OTHER_AXIS = "#8c564b"
_KINDS = {"product": "matrix products", "attention": "attention", "copy": "copies"}
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
class _Span:
    """A bar in time: what it is, when it is, and what it says."""

    name: str
    begin: float
    end: float
    text: str


def write(findings: Findings, path: Path) -> None:
    """Write the picture of a step, and beside it the Chrome trace, `path` with the end .json.gz.

    Args:
        findings: of the step.
        path: of the page, .html.

    Raises:
        OSError: the files cannot be written.
    """
    with atomic_file(path, "w") as handle:
        handle.write(html(findings))
    with atomic_file(path.with_suffix(".json.gz"), "wb") as binary:
        binary.write(gzip.compress(json.dumps({"traceEvents": list(trace(findings))}).encode()))


def html(findings: Findings) -> str:
    """Return the page."""
    first, end = findings.time.window
    begin, until = _detail(findings)
    pictures = [picture(findings, "The whole step", first, end)]
    if until - begin < end - first:
        pictures.append(picture(findings, f"From {1e3 * (begin - first):,.1f} to {1e3 * (until - first):,.1f} ms", begin, until))
    used = {span.name for _, spans in _rows(findings) for span in spans if span.begin < end and span.end > first}
    legend = [(_color(name), name) for name in (*COLORS, *sorted(used - {*COLORS})) if name in used] + [
        (color, name) for name, color in WAITS.items()
    ]
    return page.render("timeline.html.jinja", "Timeline of a step", pictures=pictures, legend=legend, lines=list(findings.lines()))


def picture(findings: Findings, title: str, begin: float, end: float) -> Picture:
    """Return the picture of the part of a step from `begin` up to `end`, seconds."""
    rows = [Row(name, TOP + number * (ROW + GAP), list(_bars(spans, begin, end))) for number, (name, spans) in enumerate(_rows(findings))]
    start = findings.time.window[0]
    places = ticks([1e3 * (begin - start), 1e3 * (end - start)], about=8)
    at = [(start + place / 1e3, f"{place:,g}") for place in places]
    return Picture(
        title,
        rows,
        list(_bars([_Span(EXPOSED, *interval, EXPOSED) for interval in findings.time.exposed_intervals], begin, end)),
        list(_bars([_Span(LATE, *interval, LATE) for interval in findings.time.host_intervals], begin, end)),
        [(f"{_x(time, begin, end):.1f}", label) for time, label in at if begin <= time <= end],
        TOP + len(rows) * (ROW + GAP) + 36,
    )


def trace(findings: Findings) -> Iterator[dict[str, Any]]:
    """Yield the events of a Chrome trace."""
    streams = sorted({placed.work.stream for placed in findings.replay.work})
    for number, (stream, name) in enumerate([(-1, "host"), *((stream, f"stream {stream:#x}") for stream in streams)]):
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": stream, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": stream, "args": {"sort_index": number}}
    for placed in findings.replay.work:
        work = placed.work
        arguments = {"line": work.site, "queued_us": 1e6 * placed.queued, "axis": work.axis, "bytes": work.size}
        category = "gpu_memcpy" if work.kind == "copy" else "kernel"
        name = f"{work.axis} {work.name}" if work.kind == "collective" else work.name
        yield _complete(name, category, work.stream, placed.begin, placed.end, arguments)
    for waited in findings.replay.waits:
        yield _complete(f"wait for {waited.wait.name}", "cuda_runtime", -1, waited.begin, waited.end, {"line": waited.wait.site})
    for begin, end in findings.time.exposed_intervals:
        yield _complete("exposed communication", "user_annotation", -2, begin, end, {})
    for name, at, _ in findings.replay.marks:
        yield {"ph": "i", "name": name, "pid": 0, "tid": -1, "ts": 1e6 * at, "s": "p"}


def _complete(name: str, category: str, row: int, begin: float, end: float, arguments: dict[str, Any]) -> dict[str, Any]:
    """An event with a duration; a trace has microseconds."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": 0,
        "tid": row,
        "ts": 1e6 * begin,
        "dur": 1e6 * (end - begin),
        "args": arguments,
    }


def _detail(findings: Findings) -> Interval:
    """The part of the second picture: around the longest exposed communication, or else in the middle."""
    step, (opens, closes) = findings.time.step, findings.time.window
    middle = (opens + closes) / 2
    begin, end = max(findings.time.exposed_intervals, key=lambda pair: pair[1] - pair[0], default=(middle, middle))
    width = min(step, max(_DETAIL * step, 2 * (end - begin)))
    first = min(max(opens, (begin + end - width) / 2), closes - width)
    return first, first + width


def _rows(findings: Findings) -> list[tuple[str, list[_Span]]]:
    """The host, the streams that compute, and the streams of collectives and copies."""
    waits = [
        _Span("waits of the host", wait.begin, wait.end, f"waits for {wait.wait.name} at {wait.wait.site or '?'}")
        for wait in findings.replay.waits
    ]
    streams: defaultdict[int, list[Placed]] = defaultdict(list)
    for placed in findings.replay.work:
        streams[placed.work.stream].append(placed)
    rows = [(_stream_name(work), [_span(placed) for placed in work]) for work in streams.values()]
    return [("host", waits), *sorted(rows, key=lambda row: (not row[0].startswith("kernels"), row[0]))]


def _stream_name(work: Sequence[Placed]) -> str:
    """What a stream runs."""
    axes = sorted({placed.work.axis for placed in work if placed.work.kind == "collective"})
    computes = any(placed.work.kind in ("product", "attention", "kernel", "fill") for placed in work)
    first = f"kernels, stream {work[0].work.stream:#x}" if computes else f"stream {work[0].work.stream:#x}"
    return f"{', '.join(axes)}, {first}" if axes and not computes else first


def _span(placed: Placed) -> _Span:
    """Work as a bar."""
    work = placed.work
    name = f"collectives: {work.axis}" if work.kind == "collective" else _KINDS.get(work.kind, "other kernels")
    return _Span(name, placed.begin, placed.end, f"{work.name} at {work.site or '?'}")


def _color(name: str) -> str:
    """The color of a kind of work."""
    return COLORS.get(name) or WAITS.get(name) or AXES.get(name.removeprefix("collectives: "), _OTHER_AXIS)


def _x(time: float, begin: float, end: float) -> float:
    """The place of a time."""
    return LEFT + (time - begin) / (end - begin) * (WIDTH - LEFT - 10) if end > begin else LEFT


def _bars(spans: Sequence[_Span], begin: float, end: float) -> Iterator[WorkBar]:
    """Bars of a row: each column has the kind that takes most of it, and neighbors that look alike are one bar."""
    columns: defaultdict[int, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    longest: dict[int, _Span] = {}
    for span in spans:
        first, last = (_x(min(max(time, begin), end), begin, end) for time in (span.begin, span.end))
        if span.begin >= end or span.end <= begin:
            continue
        column = int(first)
        while column < last:
            columns[column][span.name] += min(last, column + 1) - max(first, column)
            if column not in longest or span.end - span.begin > longest[column].end - longest[column].begin:
                longest[column] = span
            column += 1
    run: tuple[int, int, tuple[str, str], _Span] | None = None
    for column in sorted(columns):
        busy = sum(columns[column].values())
        look = max(columns[column], key=lambda name: columns[column][name]), f"{max(1, min(4, round(4 * busy))) / 4:g}"
        if run is not None and run[1] == column and run[2] == look:
            text = max(run[3], longest[column], key=lambda span: span.end - span.begin)
            run = run[0], column + 1, look, text
            continue
        if run is not None:
            yield _bar(run)
        run = column, column + 1, look, longest[column]
    if run is not None:
        yield _bar(run)


def _bar(run: tuple[int, int, tuple[str, str], _Span]) -> WorkBar:
    """A run of columns as a bar, which names the longest work in it."""
    first, last, (name, opacity), span = run
    text = f"{span.text}: {1e3 * span.begin:,.3f} to {1e3 * span.end:,.3f} ms"
    return WorkBar(str(first), str(last - first), _color(name), opacity, text)
