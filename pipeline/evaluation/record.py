"""The scores of the checkpoints of a run: one JSON file for each evaluation, and all of them as a table and as plots over steps."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common import page
from pipeline.common.atomic_files import atomic_file

#: Folder of the records in the run directory.
FOLDER = "evaluations"
TABLE, REPORT = "table.csv", "report.html"
#: Size of a plot, pixels: width, height, and the margin around its axes.
_WIDTH, _HEIGHT, _MARGIN = 340, 190, 34


def is_due(step: int, every: int, steps: int) -> bool:
    """Whether the checkpoint of a step is evaluated: that of every `every` steps, and the last one."""
    return step % every == 0 or step == steps


def path_of(run_dir: Path, step: int, kind: str) -> Path:
    """Path of a record; the kind is "validation", "tasks", or "translation-" with the name of the prompts."""
    return run_dir / FOLDER / f"step-{step:08d}-{kind}.json"


def is_recorded(run_dir: Path, step: int, kind: str, settings: dict[str, Any]) -> bool:
    """Whether a checkpoint was evaluated with these settings."""
    path = path_of(run_dir, step, kind)
    return path.is_file() and json.loads(path.read_text(encoding="utf-8")).get("settings") == json.loads(json.dumps(settings))


def write(
    run_dir: Path,
    step: int,
    kind: str,
    scores: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    more: Mapping[str, Any] | None = None,
) -> None:
    """Record the scores of a checkpoint, and write the table and the plots of all records.

    Args:
        run_dir: the run directory.
        step: of the checkpoint.
        kind: as in path_of.
        scores: corpus or task -> metric -> value, None for one that does not exist; "" is the full validation split.
        settings: what the scores depend on.
        more: what else the record has: "read" and "confusion" of validation_scores.py Evaluation.
    """
    (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
    with atomic_file(path_of(run_dir, step, kind), "w") as handle:
        json.dump({"step": step, "scores": scores, **(more or {}), "settings": settings}, handle, indent=1)
        handle.write("\n")
    written: dict[int, dict[str, float]] = {}
    while (recorded := read(run_dir)) != written:  # another job of the same array may have added a record
        written = recorded
        _write_table(run_dir / FOLDER, recorded)


def read(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return the scores of all records: step -> column -> value, in the order of the steps."""
    rows: dict[int, dict[str, float]] = {}
    for path in sorted((run_dir / FOLDER).glob("step-*.json"), key=lambda path: (path.name[:13], not path.stem.endswith("validation"))):
        if re.fullmatch(r"step-\d{8}-(validation|tasks|translation-.+)\.json", path.name):
            content = json.loads(path.read_text(encoding="utf-8"))
            for name, metrics in content["scores"].items():
                values = {f"{name} {metric}".strip(): value for metric, value in metrics.items() if value is not None}
                rows.setdefault(content["step"], {}).update(values)
    return rows


def columns_of(rows: dict[int, dict[str, float]]) -> list[str]:
    """Return the columns of the table; numbers that describe a task are not scores."""
    names = dict.fromkeys(name for row in rows.values() for name in row)
    return [name for name in names if not name.endswith((" num_fewshot", " samples", " sample_len"))]


def _write_table(folder: Path, rows: dict[int, dict[str, float]]) -> None:
    """Write the table as CSV, and with the plots as a page."""
    columns = columns_of(rows)
    with atomic_file(folder / TABLE, "w") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(["step", *columns])
        writer.writerows([step, *(row.get(name, "") for name in columns)] for step, row in rows.items())
    cells = [[step, *(f"{row[name]:.4f}" if name in row else "-" for name in columns)] for step, row in rows.items()]
    plotted = [name for name in columns if not re.search(r"_stderr\b", name)]
    curves = [curve(name, [(step, row[name]) for step, row in rows.items() if name in row]) for name in plotted]
    with atomic_file(folder / REPORT, "w") as handle:
        handle.write(
            page.render("evaluation_report.html.jinja", "Evaluation of checkpoints", curves=curves, head=["step", *columns], rows=cells)
        )


@dataclass(frozen=True)
class Curve:
    """A plot of scores over steps, in pixels.

    Attributes:
        labels: (x, y, anchor, text) of the texts around it.
        points: (x, y, text) of each score.
        width, height: of the plot.
    """

    labels: list[tuple[int, int, str, str]]
    points: list[tuple[str, str, str]]
    width: int = _WIDTH
    height: int = _HEIGHT


def curve(title: str, scores: Sequence[tuple[int, float]]) -> Curve:
    """Return the plot of (step, score) pairs."""
    steps, values = [step for step, _ in scores], [value for _, value in scores]
    low, high, first, last = min(values), max(values), min(steps), max(steps)

    def place(step: int, value: float) -> tuple[str, str]:
        x = (step - first) / (last - first) if last > first else 0.5
        y = (value - low) / (high - low) if high > low else 0.5
        return f"{_MARGIN + x * (_WIDTH - 2 * _MARGIN):.1f}", f"{_HEIGHT - _MARGIN - y * (_HEIGHT - 2 * _MARGIN):.1f}"

    bottom = _HEIGHT - 12
    labels = [
        (_MARGIN, 16, "start", title),
        (_MARGIN, bottom, "start", f"step {first}"),
        (_WIDTH - _MARGIN, bottom, "end", f"{last}" if last > first else ""),
        (_WIDTH - _MARGIN, 16, "end", f"{low:.4g} to {high:.4g}" if high > low else f"{low:.4g}"),
    ]
    return Curve(labels, [(*place(step, value), f"step {step}: {value:.4f}") for step, value in scores])
