"""The scores of the checkpoints of a run: one JSON file for each evaluation, and all of them as a table and as plots over steps."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.common.atomic_files import atomic_file
from pipeline.evaluation import report

#: Folder of the records in the run directory.
FOLDER = "evaluations"
TABLE, REPORT = "table.csv", "report.html"
#: The setting of a record that names other weights than those of the optimizer.
WEIGHTS = "stage.weights"


def is_due(step: int, every: int, steps: int) -> bool:
    """Whether the checkpoint of a step is evaluated: that of every `every` steps, and the last one."""
    return step % every == 0 or step == steps


def path_of(run_dir: Path, step: int, kind: str, weights: str | None = None) -> Path:
    """Path of a record.

    Args:
        run_dir: the run directory.
        step: of the checkpoint.
        kind: "validation", "tasks", or "translation-" with the name of the prompts.
        weights: "ema" for averaged weights; None for those of the optimizer.
    """
    return run_dir / FOLDER / f"step-{step:08d}-{'-'.join([kind, *([weights] if weights else [])])}.json"


def is_recorded(run_dir: Path, step: int, kind: str, settings: dict[str, Any]) -> bool:
    """Whether a checkpoint was evaluated with these settings."""
    path = path_of(run_dir, step, kind, settings.get(WEIGHTS))
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
        settings: what the scores depend on; those of other weights (stage.weights) are named after them.
        more: what else the record has: "read" and "confusion" of validation_scores.py Evaluation.
    """
    (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
    if (weights := settings.get(WEIGHTS)) is not None:
        scores = {f"{weights} {name}".strip(): values for name, values in scores.items()}
    with atomic_file(path_of(run_dir, step, kind, weights), "w") as handle:
        json.dump({"step": step, "scores": scores, **(more or {}), "settings": settings}, handle, indent=1)
        handle.write("\n")
    written: list[dict[str, Any]] = []
    while (recorded := read_records(run_dir)) != written:  # another job of the same array may have added a record
        written = recorded
        _write_table(run_dir, recorded)


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """Return the content of all records, in the order of the steps; of a step, that of the validation split comes first."""
    paths = (run_dir / FOLDER).glob("step-*.json")
    named = [path for path in paths if re.fullmatch(r"step-\d{8}-((validation|tasks)(-ema)?|translation-.+)\.json", path.name)]
    named.sort(key=lambda path: (path.name[:13], not path.stem.endswith("validation"), path.name))
    return [json.loads(path.read_text(encoding="utf-8")) for path in named]


def read(run_dir: Path) -> dict[int, dict[str, float]]:
    """Return the scores of all records: step -> column -> value, in the order of the steps."""
    return _rows(read_records(run_dir))


def _rows(records: Sequence[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """The scores of records, as `read` returns them."""
    rows: dict[int, dict[str, float]] = {}
    for content in records:
        for name, metrics in content["scores"].items():
            values = {f"{name} {metric}".strip(): value for metric, value in (metrics or {}).items() if value is not None}
            rows.setdefault(content["step"], {}).update(values)
    return rows


def columns_of(rows: dict[int, dict[str, float]]) -> list[str]:
    """Return the columns of the table; numbers that describe a task are not scores."""
    names = dict.fromkeys(name for row in rows.values() for name in row)
    return [name for name in names if not name.endswith(tuple(f" {note}" for note in report.NOTES))]


def _write_table(run_dir: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write the table as CSV, and with the charts as a page."""
    rows, folder = _rows(records), run_dir / FOLDER
    columns = columns_of(rows)
    with atomic_file(folder / TABLE, "w") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(["step", *columns])
        writer.writerows([step, *(row.get(name, "") for name in columns)] for step, row in rows.items())
    cells = [[step, *(f"{row[name]:.4f}" if name in row else "-" for name in columns)] for step, row in rows.items()]
    with atomic_file(folder / REPORT, "w") as handle:
        handle.write(report.render(run_dir, records, (["step", *columns], cells)))
