"""The scores of the checkpoints of a run: one JSON file for each evaluation, and all of them as a table and as plots over steps."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.common import page
from pipeline.common.atomic_files import atomic_file
from pipeline.common.charts import COLORS, Chart, Series, chart, unit_of

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
        written, rows, folder = recorded, _rows(recorded), run_dir / FOLDER
        columns = columns_of(rows)
        with atomic_file(folder / TABLE, "w") as handle:
            table = csv.writer(handle, lineterminator="\n")
            table.writerow(["step", *columns])
            table.writerows([step, *(row.get(name, "") for name in columns)] for step, row in rows.items())
        cells = [[step, *(f"{row[name]:.4f}" if name in row else "-" for name in columns)] for step, row in rows.items()]
        with atomic_file(folder / REPORT, "w") as handle:
            handle.write(render(run_dir, recorded, (["step", *columns], cells)))


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
    return [name for name in names if not name.endswith(tuple(f" {note}" for note in NOTES))]


#: Name of the scores of the full validation split.
WHOLE = "full validation split"
#: Entries of a record that describe scores and are none: the number of examples, of documents.
NOTES = ("num_fewshot", "samples", "sample_len")
#: What follows the name of a score in that of its standard error.
ERROR = "_stderr"


def render(run_dir: Path, records: Sequence[Mapping[str, Any]], table: tuple[list[str], list[list[Any]]]) -> str:
    """Return the page of the records, in the order of their steps; those of the validation split first."""
    step = records[-1]["step"]
    newest = [record for record in records if record["step"] == step]
    steps = {record["step"] for record in records}
    return page.render(
        "evaluation_report.html.jinja",
        f"Evaluation of {run_name(run_dir)}",
        verdict=verdict(newest),
        step=step,
        read=next((_read(record["read"]) for record in newest if "read" in record), ""),
        tables=[scores_table(record["scores"]) for record in newest if any(record["scores"].values())],
        confusions=[_confusion(record["confusion"]) for record in newest if "confusion" in record],
        charts=charts(records) if len(steps) > 1 else [],
        head=table[0] if len(steps) > 1 else [],
        rows=table[1],
    )


def run_name(run_dir: Path) -> str:
    """Return the name of a run: that of its directory, of a sweep's numbered run with that of the sweep."""
    path = run_dir.resolve()
    return f"{path.parent.name}/{path.name}" if path.name.isdigit() else path.name


def verdict(newest: Sequence[Mapping[str, Any]]) -> str:
    """Return the headline: the scores on the full validation split, else the first scores of the newest checkpoint."""
    scored = ((name, values) for record in newest for name, values in record["scores"].items() if values)
    name, scores = next(scored, ("", dict[str, Any]()))
    parts = [f"{metric.replace('_', ' ')} {text}" for metric, text in _texts(scores).items()]
    loss = scores.get("validation_loss")
    unit = " nats per target" if loss is not None and "perplexity" in scores else ""
    parts[:1] = [parts[0] + unit] if parts else ["no scores"]
    return ", ".join(parts) if not name else f"{name}: {', '.join(parts)}"


def _texts(scores: Mapping[str, Any]) -> dict[str, str]:
    """The scores of one split or task as text, with their standard errors; a score that does not exist is left out."""
    shown = {name: value for name, value in scores.items() if value is not None and ERROR not in name and name not in NOTES}
    return {name: f"{value:.4f}" + (f" ± {error:.4f}" if (error := _error(scores, name)) else "") for name, value in shown.items()}


def _error(scores: Mapping[str, Any], metric: str) -> float | None:
    """The standard error of a score; in the name of a metric of lm-eval, the name of a filter follows it."""
    name, space, filtered = metric.partition(" ")
    return scores.get(f"{name}{ERROR}{space}{filtered}")


def _read(read: Mapping[str, int]) -> str:
    """How much of the split was read."""
    part = "all" if read["sequences"] == read["available"] else f"{read['sequences']:,} of"
    return f"on {part} {read['available']:,} sequences of the validation split, {read['targets']:,} targets"


def scores_table(scores: Mapping[str, Mapping[str, Any] | None]) -> tuple[list[str], list[list[Any]]]:
    """Return the scores of a record as head and rows: a row for each corpus or task, a column for each score."""
    texts = {name: _texts(values or {}) for name, values in scores.items()}
    columns = list(dict.fromkeys(metric for row in texts.values() for metric in row))
    notes = [note for note in NOTES[:2] if any((values or {}).get(note) is not None for values in scores.values())]
    names = {"num_fewshot": "shots", "samples": "documents"}
    rows = [
        [name or WHOLE, *(texts[name].get(column, "-") for column in columns), *(_note(values, note) for note in notes)]
        for name, values in scores.items()
    ]
    return ["", *(column.replace("_", " ") for column in columns), *(names[note] for note in notes)], rows


def _note(scores: Mapping[str, Any] | None, note: str) -> Any:
    """A number that describes the scores."""
    value = (scores or {}).get(note)
    return "-" if value is None else value


def _confusion(matrix: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """A confusion matrix as head and rows; the correct labels are bold."""
    rows = [
        [label, *(page.Bold(f"{count:,}") if column == row else count for column, count in enumerate(counts))]
        for row, (label, counts) in enumerate(zip(matrix["labels"], matrix["counts"], strict=True))
    ]
    return ["label", *(f"predicted {label}" for label in matrix["labels"])], rows


def charts(records: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """Return a chart for each score that several checkpoints have, with a series for each corpus or task."""
    by_metric: dict[str, dict[str, dict[int, tuple[float, float]]]] = {}
    for record in records:
        for name, scores in record["scores"].items():
            for metric, value in (scores or {}).items():
                if value is not None and ERROR not in metric and metric not in NOTES:
                    error = _error(scores, metric) or 0.0
                    by_metric.setdefault(metric, {}).setdefault(name, {})[record["step"]] = (value, error)
    drawn = []
    for metric, splits in by_metric.items():
        series = [
            Series(
                name or WHOLE, [(step, value) for step, (value, _) in values.items()], {step: error for step, (_, error) in values.items()}
            )
            for name, values in splits.items()
            if len(values) > 1
        ]
        groups = [series[first : first + len(COLORS)] for first in range(0, len(series), len(COLORS))]
        drawn += [chart(metric.replace("_", " "), unit_of(metric), group) for group in groups]
    return drawn
