"""The table of a sweep, from the files of its runs: what each point was trained with, how far it is, and how good; the best one first."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.common import metrics_file
from pipeline.common.artifact import MANIFEST
from pipeline.common.atomic_files import atomic_file
from pipeline.report import comparison
from pipeline.report import run as runs
from pipeline.report.run import LOSS_STEPS, Run
from pipeline.report.table import plain

#: Files in the folder of the sweep.
MARKDOWN, JSON = "table.md", "table.json"


@dataclass(frozen=True)
class Point:
    """A run of a sweep.

    Attributes:
        run_dir: its run directory.
        values: the settings that differ between the points, "key=value".
        steps: training.steps; None for a stage that does not train.
        state: what is known beside the files of the run: why it failed, or that it is in a queue; empty for nothing.
    """

    run_dir: Path
    values: tuple[str, ...]
    steps: int | None
    state: str = ""


@dataclass(frozen=True)
class Row:
    """A row of the table; None for what the run has not written.

    Attributes:
        values: as in Point.
        state: as in Point, else finished, the state of the run with "step N of M", or not started.
        step: last step.
        loss: mean training loss of the last steps, nats per target.
        validation_loss: that of the last validation, with its standard error; bits_per_byte of the same one.
        within_noise: whether the point may be as good as the first one (comparison.Place).
        best_validation_loss: the lowest one, with its step.
        tokens_per_second: as in report/run.py, with which step and losses agree as well.
        run_dir: the run directory.
    """

    values: tuple[str, ...]
    state: str
    step: int | None
    loss: float | None
    validation_loss: float | None
    validation_loss_stderr: float | None
    bits_per_byte: float | None
    best_validation_loss: float | None
    best_step: int | None
    tokens_per_second: float | None
    run_dir: str
    within_noise: bool = False


def rows(points: Sequence[Point]) -> tuple[list[Row], str]:
    """Return the rows, the best one first as comparison.compare sorts them, and which is best, in words; empty if none has a loss."""
    found = [runs.read(point.run_dir) for point in points]
    places = comparison.compare(found, [point.values for point in points], [point.run_dir.name for point in points])
    of_run = {run.run_dir: point for run, point in zip(found, points, strict=True)}
    ordered = [replace(row(of_run[place.run.run_dir], place.run), within_noise=place.within_noise) for place in places]
    return ordered, comparison.verdict(places) if any(run.loss is not None for run in found) else ""


def row(point: Point, run: Run) -> Row:
    """Return the row of a point."""
    validations = metrics_file.columns(metrics_file.read(point.run_dir)).get("validation_loss", [])
    best = min(validations, key=lambda validation: validation[1], default=(None, None))
    step = run.step or None
    return Row(
        values=point.values,
        state="; ".join(filter(None, (point.state or _state(point, run), run.trouble))),
        step=step,
        loss=run.loss,
        validation_loss=run.validation_loss,
        validation_loss_stderr=run.validation_loss_stderr,
        bits_per_byte=run.bits_per_byte,
        best_validation_loss=best[1],
        best_step=best[0],
        tokens_per_second=run.tokens_per_second,
        run_dir=str(point.run_dir),
    )


def _state(point: Point, run: Run) -> str:
    """How far a run is, by its files."""
    manifest = point.run_dir / MANIFEST
    if point.steps is None:
        return "not started"
    if manifest.is_file() and json.loads(manifest.read_text(encoding="utf-8"))["totals"].get("step", 0) >= point.steps:
        return "finished"
    if not run.step:
        return "not started"
    return f"{run.state}: step {run.step:,} of {point.steps:,}" if run.starts else f"step {run.step:,} of {point.steps:,}"


def write(folder: Path, points: Sequence[Point]) -> str:
    """Write table.md and table.json to the folder of a sweep, and return the table as text.

    Args:
        folder: of the sweep.
        points: its runs.
    """
    found, verdict = rows(points)
    with atomic_file(folder / JSON, "w") as handle:
        json.dump([{name: plain(value) for name, value in asdict(row).items()} for row in found], handle, indent=1, allow_nan=False)
        handle.write("\n")
    head, cells = _cells(found)
    with atomic_file(folder / MARKDOWN, "w") as handle:
        for line in (head, ["---"] * len(head), *cells):
            handle.write(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n")
        handle.write(f"\n{verdict}\n" if verdict else "")
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in (head, *cells)]
    return "\n".join(filter(None, [*lines, verdict]))


def _cells(found: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The head of the table and its cells; a column that no run has a value for is left out."""
    keys = list(dict.fromkeys(value.partition("=")[0] for row in found for value in row.values))
    columns: dict[str, list[str]] = {key: [dict(v.partition("=")[::2] for v in row.values).get(key, "") for row in found] for key in keys}
    columns["validation loss"] = [_with_error(row.validation_loss, row.validation_loss_stderr) for row in found]
    columns["bits per byte"] = ["" if row.bits_per_byte is None else f"{row.bits_per_byte:.4f}" for row in found]
    columns["best (step)"] = ["" if row.best_step is None else f"{row.best_validation_loss:.4f} ({row.best_step:,})" for row in found]
    columns[f"training loss (last {LOSS_STEPS})"] = ["" if row.loss is None else f"{row.loss:.4f}" for row in found]
    columns["steps"] = ["" if row.step is None else f"{row.step:,}" for row in found]
    columns["tokens/s"] = ["" if row.tokens_per_second is None else f"{row.tokens_per_second:,.0f}" for row in found]
    columns["in the noise"] = ["yes" if row.within_noise and number else "" for number, row in enumerate(found)]
    columns["state"] = [row.state for row in found]
    columns["run_dir"] = [row.run_dir for row in found]
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    return list(shown), [list(line) for line in zip(*shown.values(), strict=True)]


def _with_error(loss: float | None, error: float | None) -> str:
    """A loss with its standard error, if it has one."""
    return "" if loss is None else f"{loss:.4f}" + (f" +- {error:.4f}" if error else "")
