"""The page of a run, or of several for a comparison: answers, charts with every restart marked, and tables. It loads nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.common import charts, page
from pipeline.common.charts import unit_of
from pipeline.common.page import Bar
from pipeline.report.answers import Answer, answers, end, last_error, last_validation, moment, short, validation
from pipeline.report.comparison import RankedRun, compare, differing, names_of, verdict
from pipeline.report.history import History
from pipeline.report.run import duration
from pipeline.report.starts import Start
from pipeline.report.table import problems

#: Metrics that are drawn, in order.
_DRAWN = ("loss", "validation_loss", "bits_per_byte", "grad_norm", "tokens_per_second", "lr", "skipped", "memory_gb")
#: Share of the steps that a second chart of the loss shows; means of a series at most, and steps of one at least.
_LAST_PART, _MEANS, _SMOOTHED = 0.2, 120, 5
_TEMPLATE = "run_report.html.jinja"

#: title, explanation, head and rows
Table = tuple[str, str, list[str], list[list[Any]]]


def of_run(history: History, also: Sequence[str] = (), refresh: float | None = None) -> str:
    """Return the page of a run.

    Args:
        history: of the run.
        also: further sentences on what is missing.
        refresh: seconds after which a browser reads the page again.
    """
    run = history.run
    answered = answers(history)
    restarts = [(float(start.step), f"restart at step {start.step:,}: {short(start.cause)}") for start in run.starts[1:]]
    tables = [_starts(run.starts)] if run.starts else []
    tables += [_spent(history)] if history.spent else []
    tables += [_seen(history)] if history.seen else []
    return page.render(
        _TEMPLATE,
        f"Training of {Path(run.run_dir).resolve().name}",
        verdict=f"{str(run.state).capitalize()}: {'; '.join(filter(None, (end(run), run.trouble)))}",
        level="bad" if run.trouble else answered[0].level or "neither",
        more=run.run_dir,
        problems=[*run.problems, *also],
        answers=[*answered, *last_validation(run), *last_error(run)],
        charts=_charts([history], restarts),
        marked=bool(restarts),
        first=[],
        tables=tables,
        refresh=refresh,
    )


def of_runs(histories: Sequence[History], also: Sequence[str] = ()) -> str:
    """Return the page that compares runs, at least two; `also` as in of_run."""
    places = compared(histories)
    by_path = {history.run.run_dir: history for history in histories}
    ordered = [by_path[place.run.run_dir] for place in places]
    bad = [place.name for place, history in zip(places, ordered, strict=True) if answers(history)[0].level == "bad"]
    shown = ordered[: len(charts.COLORS)]
    more = f"The charts show the first {len(shown)} of {len(ordered)} runs." if len(shown) < len(ordered) else ""
    head = ["run", "state", "step", "loss", "validation loss", "above the best", "tokens/s", "node-hours", "lost", "restarts", "left"]
    rows = [_compared(place, history) for place, history in zip(places, ordered, strict=True)]
    tables: list[Table] = [("Runs, the best one first", _NOISE, head, rows)]
    if any(place.values for place in places):
        tables.append(
            ("Settings that differ", "", ["run", "settings"], [[place.name, short(", ".join(place.values), 400)] for place in places])
        )
    return page.render(
        _TEMPLATE,
        f"{len(places)} runs",
        verdict=verdict(places),
        level="",
        more=more,
        problems=[*problems([(place.name, place.run) for place in places]), *also],
        answers=[
            Answer("Which run is best, and by how much?", verdict(places)),
            Answer("Are they alive?", f"{', '.join(bad)}: see the table" if bad else "no run has failed", "bad" if bad else "good"),
            Answer("When does the last one end?", _last_end(places)),
        ],
        charts=_charts(shown, []),
        marked=False,
        first=tables,
        tables=[],
    )


def compared(histories: Sequence[History]) -> list[RankedRun]:
    """Return the runs with the settings in which they differ, the best one first."""
    return compare([history.run for history in histories], differing([history.config for history in histories]))


def _last_end(places: Sequence[RankedRun]) -> str:
    """The run that ends last, of those that are running."""
    running = [place for place in places if place.run.seconds_left is not None]
    if not running:
        return "none is running"
    last = max(running, key=lambda place: place.run.seconds_left or 0.0)
    return f"{last.name}: {end(last.run)}"


_NOISE = (
    "Loss: mean of the last 20 training steps. The errors are standard errors of the validation; runs that read the same samples differ "
    "less by chance than they say."
)


def _compared(place: RankedRun, history: History) -> list[Any]:
    """The row of a run in a comparison."""
    run = place.run
    behind = "-" if place.behind is None else f"{place.behind:.4f}" + ("" if place.error is None else f" +- {place.error:.4f}")
    return [
        place.name,
        str(run.state),
        f"{run.step:,} of {run.steps:,}" if run.steps is not None else f"{run.step:,}",
        "-" if run.loss is None else f"{run.loss:.4f}",
        validation(run),
        behind,
        "-" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
        "-" if run.node_hours is None else f"{run.node_hours:.2f}",
        f"{history.lost:.2f}" if history.spent else "-",
        str(run.restarts) if run.starts else "-",
        "-" if run.seconds_left is None else duration(run.seconds_left),
    ]


def _charts(histories: Sequence[History], markers: Sequence[tuple[float, str]]) -> list[charts.Chart]:
    """The charts of the metrics that a run has."""
    names = names_of([Path(history.run.run_dir) for history in histories]) if len(histories) > 1 else [""]
    drawn = []
    for metric in _DRAWN:
        series = [
            charts.Series(name, history.columns.get(metric, []), dict(history.columns.get(f"{metric}_stderr", [])))
            for name, history in zip(names, histories, strict=True)
        ]
        if not any(curve.points for curve in series) or (
            metric == "skipped" and not any(value for curve in series for _, value in curve.points)
        ):
            continue
        title, several = metric.replace("_", " "), len(series) > 1 and metric not in ("validation_loss", "bits_per_byte")
        if several:  # lines of all steps would hide each other
            series = [charts.Series(curve.name, _means(curve.points)) for curve in series]
        elif metric == "loss" and len(series) == 1:
            series = _with_validations(histories[0])
        drawn.append(charts.chart(f"{title}, means" if several else title, unit_of(metric), series, markers=markers))
        if metric == "loss" and (late := _late(series)):
            drawn.append(charts.chart(f"loss, last {_LAST_PART:.0%} of the steps", unit_of(metric), late, markers=markers))
    return drawn


def _with_validations(history: History) -> list[charts.Series]:
    """The training loss of a run, its means, and the validation loss, in the same axes."""
    columns = history.columns
    validations = charts.Series("validation", columns.get("validation_loss", []), dict(columns.get("validation_loss_stderr", [])))
    training = [charts.Series("each step", columns["loss"]), charts.Series("means", _means(columns["loss"], _SMOOTHED))]
    return [*training, *([validations] if validations.points else [])]


def _means(points: Sequence[tuple[float, float]], least: int = 1) -> list[tuple[float, float]]:
    """The means of intervals of a series, at most _MEANS of them, of at least some points."""
    size = max(least, -(-len(points) // _MEANS))
    parts = [points[begin : begin + size] for begin in range(0, len(points), size)]
    return [(part[len(part) // 2][0], statistics.fmean(value for _, value in part)) for part in parts]


def _late(series: Sequence[charts.Series]) -> list[charts.Series]:
    """The last part of the steps, where the first losses do not set the scale; empty for short runs."""
    last = max((step for curve in series for step, _ in curve.points), default=0)
    late = [charts.Series(curve.name, [(s, v) for s, v in curve.points if s >= (1 - _LAST_PART) * last], curve.errors) for curve in series]
    return late if any(len(curve.points) >= 20 for curve in late) else []


def _starts(starts: Sequence[Start]) -> Table:
    """The table of starts."""
    head = ["start", "at", "job", "nodes", "from step", "layout", "changed settings", "time", "why it ended"]
    rows: list[list[Any]] = [
        [
            number,
            moment(start.begin),
            start.job.id if start.job else "-",
            ", ".join(start.nodes) if len(start.nodes) <= 4 else f"{len(start.nodes)}: {start.nodes[0]} to {start.nodes[-1]}",
            start.step,
            start.layout or "-",
            short(", ".join(start.changed)) or "-",
            "-" if start.end is None else duration(start.end - start.begin),
            short(start.reason) or ("finished" if start.code == 0 else "-"),
        ]
        for number, start in enumerate(starts, start=1)
    ]
    return "Starts", "", head, rows


def _spent(history: History) -> Table:
    whole = history.run.node_hours or 0.0
    note = "Waiting: nodes without ranks. A failure has the steps that were made again, and the time until it was noticed."
    rows: list[list[Any]] = [
        [short(spent.kind), "yes" if spent.lost else "", spent.count, f"{spent.node_hours:.3f}", Bar(spent.node_hours, whole)]
        for spent in history.spent
    ]
    return "Node-hours", note, ["spent on", "lost", "starts", "node-hours", "share"], rows


def _seen(history: History) -> Table:
    total = sum(corpus.samples for corpus in history.seen)
    rows: list[list[Any]] = [
        [
            corpus.corpus or "all data",
            corpus.samples,
            corpus.tokens,
            "-" if corpus.epochs is None else f"{corpus.epochs:.3f}",
            Bar(corpus.samples, total),
        ]
        for corpus in sorted(history.seen, key=lambda corpus: -corpus.samples)
    ]
    blended = (history.config.get("data") or {}).get("blend")
    note = "" if blended or len(rows) < 2 else "The shards are read in one order: in proportion to the tokens of each corpus."
    return "Data", note, ["corpus", "samples", "tokens", "epochs", "share"], rows
