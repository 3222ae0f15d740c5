"""Prediction of the runs of a CSV file; the columns are described in pipeline/planner/README.md."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

from pipeline.errors import UserError
from pipeline.files import atomic_file
from pipeline.planner.estimate import Estimate, estimate
from pipeline.planner.plan import hidden_bytes
from pipeline.planner.published import REQUIRED, Contradiction, Run, read
from pipeline.planner.rank_memory import ModelState
from pipeline.planner.trace import Trace, trace

PREDICTED = ("predicted_step_time_s", "predicted_memory_gb", "fits", "assumptions", "refused")


def predict(run: Run, cache: dict[str, Trace]) -> Estimate:
    """Predict a row. Traces of one block are cached by everything that they depend on.

    A row without `recompute` that does not fit is predicted with full recomputation.
    """
    result = _estimate(run, cache)
    if not result.fits and "recompute=none" in run.assumptions:
        training = replace(run.config.training, activation_checkpointing="full")
        again = replace(run, config=replace(run.config, training=training))
        other = _estimate(again, cache)
        if other.memory.total < 0.98 * result.memory.total:
            run.assumptions[run.assumptions.index("recompute=none")] = "recompute=full, since it does not fit without"
            return other
    return result


def _estimate(run: Run, cache: dict[str, Trace]) -> Estimate:
    config = run.config
    single = replace(config, model=replace(config.model, layers=1))
    parallel, training = config.parallel, config.training
    gathers = parallel.tensor, parallel.context, parallel.expert, parallel.sequence_parallel
    key = f"{single.model} {gathers} {training.micro_batch_size} {training.sequence_length} {training.activation_checkpointing} {run.fused}"
    if key not in cache:
        cache[key] = trace(single, fused=run.fused)
    composed = Trace(cache[key].parts, ("0",) * config.model.layers)
    return estimate(
        composed,
        run.layout,
        run.hardware,
        ModelState(run.zero_stage),
        hidden_bytes=hidden_bytes(config),
        practice=run.practice,
    )


def predict_table(source: Path, target: Path) -> tuple[int, int]:
    """Predict every row of a CSV file; returns the numbers of predicted and of refused rows.

    Raises:
        UserError: the file cannot be read, or lacks a required column.
    """
    rows, columns = load(source)
    cache: dict[str, Trace] = {}
    refused = 0
    for row in rows:
        row.update(dict.fromkeys(PREDICTED, ""))
        try:
            run = read(row)
            result = predict(run, cache)
        except Contradiction as error:
            row["refused"] = str(error)
            refused += 1
        else:
            row["predicted_step_time_s"] = f"{result.step_time:.5g}"
            row["predicted_memory_gb"] = f"{result.memory.total / 2**30:.2f}"
            row["fits"] = "yes" if result.fits else "no"
            row["assumptions"] = "; ".join(run.assumptions)
    with atomic_file(target, "w") as file:
        writer = csv.DictWriter(file, [*columns, *PREDICTED], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return len(rows) - refused, refused


def load(source: Path) -> tuple[list[dict[str, str]], list[str]]:
    """Read the rows and columns of a CSV file.

    Raises:
        UserError: it cannot be read, or lacks a required column.
    """
    try:
        with open(source, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = [{key: value or "" for key, value in row.items() if key is not None} for row in reader]
            columns = [name for name in reader.fieldnames or [] if name not in PREDICTED]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError.of("stage.table", source, f"cannot be read as CSV: {error}", "pass a CSV file with a header line") from error
    if missing := [name for name in REQUIRED if name not in columns]:
        rule = f"has no column {', '.join(missing)}"
        raise UserError.of("stage.table", source, rule, "pipeline/planner/README.md lists the columns")
    return rows, columns
