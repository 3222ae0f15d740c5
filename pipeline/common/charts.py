"""Line charts of the pages of reports: labeled axes with units, several series, standard errors. pages/chart.svg.jinja draws them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_UNITS = {
    "loss": "nats per target",
    "validation_loss": "nats per target",
    "bits_per_byte": "bits per byte of text",
    "perplexity": "perplexity",
    "pseudo_perplexity": "perplexity",
    "aux_loss": "nats",
    "grad_norm": "norm of the gradient",
    "lr": "learning rate",
    "tokens": "tokens",
    "samples": "sequences",
    "tokens_per_second": "tokens/s",
    "seconds": "seconds",
    "data_seconds": "seconds",
    "data_stalls": "batches",
    "skipped": "steps",
    "memory_gb": "GB (10^9 bytes)",
    "mfu": "share of the peak FLOP/s",
    "validation_targets": "targets",
    "loss_scale": "factor",
}
#: Colors of the series of a chart, which can be told apart with any color vision (Okabe and Ito 2008), in order.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5b6570", "#000000")
#: Points of a series at most; of a longer one, each interval shows its smallest and its largest value.
LONGEST = 1000
#: Points of a series at most that are marked one by one.
_MARKED = 100
#: Size of a chart, pixels, and its margins: left for labels of 9 characters.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 260, 70, 16, 26, 42


def unit_of(metric: str) -> str:
    """Return the unit of a metric of metrics.jsonl, or of a score of an evaluation; the name of one without a unit."""
    if "rewards_" in metric and not metric.endswith("accuracy"):
        return "nats"
    return _UNITS.get(metric, metric.replace("_", " "))


@dataclass(frozen=True)
class Series:
    """Values over steps.

    Attributes:
        points: (step, value), finite, in the order of the steps.
        errors: step -> standard error of the value, for those that have one.
    """

    name: str
    points: Sequence[tuple[float, float]]
    errors: dict[float, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """A series in pixels.

    Attributes:
        path: "x,y x,y ...".
        marks: (x, y, text) of the points that are marked.
        bars: (x, y, y) of the standard errors.
    """

    color: str
    path: str
    marks: list[tuple[str, str, str]]
    bars: list[tuple[str, str, str]]


@dataclass(frozen=True)
class Chart:
    """A chart in pixels.

    Attributes:
        title: above the chart.
        unit: of the values, above the vertical axis.
        across: what the horizontal axis shows.
        legend: (color, name) of each series that has a name and a point.
        x_ticks, y_ticks: (place, label).
        markers: (place, text) of events on the horizontal axis.
    """

    title: str
    unit: str
    across: str
    legend: list[tuple[str, str]]
    lines: list[Line]
    x_ticks: list[tuple[str, str]]
    y_ticks: list[tuple[str, str]]
    markers: list[tuple[str, str]] = field(default_factory=list)
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


def chart(
    title: str,
    unit: str,
    series: Sequence[Series],
    across: str = "step",
    markers: Sequence[tuple[float, str]] = (),
    names: Sequence[str] = (),
) -> Chart:
    """Return a chart of series, at least one of which has a point.

    Args:
        series: at most as many as there are colors.
        across: what the points are over.
        markers: (x, text) of events, such as restarts; those outside of the points are left out.
        names: of the places 0, 1, 2 ... on the horizontal axis, for settings, which need not be numbers.
    """
    shown = [(s, thinned(s.points)) for s in series]
    points = [point for _, some in shown for point in some]
    ends = [value + sign * s.errors.get(step, 0.0) for s, some in shown for step, value in some for sign in (-1, 1)]
    x_ticks, y_ticks = ticks([x for x, _ in points], whole=True), ticks(ends)
    low, high, first, last = y_ticks[0], y_ticks[-1], min(x for x, _ in points), max(x for x, _ in points)

    def across_at(x: float) -> str:
        share = (x - first) / (last - first) if last > first else 0.5
        return f"{LEFT + share * (WIDTH - LEFT - RIGHT):.1f}"

    def up_at(y: float) -> str:
        return f"{HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM):.1f}"

    def name_of(x: float) -> str:
        return names[int(x)] if names else f"{x:,g}"

    lines = []
    for (s, some), color in zip(shown, COLORS, strict=False):
        path = " ".join(f"{across_at(x)},{up_at(y)}" for x, y in some)
        marks = [(across_at(x), up_at(y), f"{s.name} {across} {name_of(x)}: {y:.6g}{_error(s.errors.get(x))}".strip()) for x, y in some]
        bars = [(across_at(x), up_at(y - s.errors[x]), up_at(y + s.errors[x])) for x, y in some if s.errors.get(x)]
        lines.append(Line(color, path, marks if len(some) <= _MARKED else [], bars))
    legend = [(line.color, s.name) for line, s in zip(lines, series, strict=True) if s.name and s.points]
    numbers = zip(x_ticks, labels(x_ticks), strict=True)
    x_labels = [(across_at(x), label) for x, label in (enumerate(names) if names else numbers) if first <= x <= last]
    y_labels = [(up_at(y), label) for y, label in zip(y_ticks, labels(y_ticks), strict=True)]
    marked = [(across_at(x), text) for x, text in markers if first <= x <= last]
    return Chart(title, unit, across, legend, lines, x_labels, y_labels, marked)


def _error(error: float | None) -> str:
    """A standard error as text."""
    return f" +- {error:.2g}" if error else ""


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most LONGEST points: of a longer series the smallest and the largest value of each interval, so that no peak is lost."""
    if len(points) <= LONGEST:
        return list(points)
    kept: list[tuple[float, float]] = []
    size = math.ceil(len(points) / (LONGEST // 2))
    for start in range(0, len(points), size):
        interval = points[start : start + size]
        kept += sorted({min(interval, key=lambda point: point[1]), max(interval, key=lambda point: point[1])})
    return kept


def ticks(values: Sequence[float], *, whole: bool = False, about: int = 5) -> list[float]:
    """Return evenly spaced round numbers that enclose the values, at least two.

    Args:
        values: finite.
        whole: at least 1 apart.
        about: about how many.
    """
    low, high = min(values), max(values)
    if low == high:
        low, high = (low - abs(low) * 0.1, high + abs(high) * 0.1) if low and not whole else (low - 1, high + 1)
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    distance = next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)
    distance = max(distance, 1.0) if whole else distance
    first, last = math.floor(low / distance + 1e-9), math.ceil(high / distance - 1e-9)
    return [number * distance for number in range(first, last + 1)]


def labels(values: Sequence[float]) -> list[str]:
    """Return numbers as short texts with the same unit: 0.25, 1,200, 15k, 3M, 2e-05."""
    largest = max(map(abs, values))
    distance = min((abs(after - before) for before, after in itertools.pairwise(values)), default=largest)
    if largest and largest < 1e-3:
        return [f"{value:.3g}" if abs(value) > distance / 2 else "0" for value in values]
    scale, suffix = next(((s, t) for s, t in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if largest >= 10 * s), (1.0, ""))
    digits = max(0, -math.floor(math.log10(distance / scale) + 1e-9)) if distance else 0
    return [f"{value / scale + 0.0 if abs(value) > distance / 2 else 0:,.{digits}f}{suffix}" for value in values]
