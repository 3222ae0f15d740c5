"""Prediction of the runs of a CSV file; the columns are described in tools/study/README.md."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import UserError
from pipeline.planner.estimate import Estimate, estimate
from pipeline.planner.operations import Collective, Operation, TracedPart
from pipeline.planner.state_memory import StateFormat
from pipeline.planner.trace import Trace, hidden_bytes, trace
from tools.study.cells import Contradiction
from tools.study.runs import REQUIRED, PublishedRun, read

PREDICTED = ("predicted_step_time_s", "predicted_mfu", "predicted_memory_gb", "fits", "assumptions", "refused")


#: A job whose predicted memory is within this factor may fit.
MEMORY_ERROR = 1.15


def predict(run: PublishedRun, cache: dict[str, Trace]) -> Estimate:
    """Predict a row. Traces of one block are cached by everything that they depend on.

    A row without `recompute` is predicted with full recomputation where it needs more memory than there is, beyond the error of the
    prediction; it fits if it fits with recomputation.
    """
    result = _estimate(run, cache)
    if result.fits or "recompute=none" not in run.assumptions:
        return result
    training = replace(run.config.training, activation_checkpointing="full")
    other = _estimate(replace(run, config=replace(run.config, training=training)), cache)
    if result.memory.total < MEMORY_ERROR * run.hardware.memory_gb * 1e9 or other.memory.total > 0.98 * result.memory.total:
        return replace(result, fits=other.fits)
    run.assumptions[run.assumptions.index("recompute=none")] = "recompute=full, since it does not fit without"
    return other


def _estimate(run: PublishedRun, cache: dict[str, Trace]) -> Estimate:
    config = run.config
    traced = traced_row(run, cache)
    last = traced.kinds[-1]
    kinds = (*traced.kinds, *[last] * (config.model.layers - len(traced.kinds)))
    parts = {name: dispatched(part, config.parallel.tensor, run.expert_tensor) for name, part in traced.parts.items()}
    return estimate(
        Trace(parts, kinds[: config.model.layers]),
        run.layout,
        run.hardware,
        StateFormat(run.sharding.stage),
        hidden_bytes=hidden_bytes(config),
        engine=run.engine,
    )


def traced_row(run: PublishedRun, cache: dict[str, Trace]) -> Trace:
    """Return the trace of the first blocks of a row's model, up to the first one that all others are like."""
    config = run.config
    first = replace(config, model=replace(config.model, layers=1 + getattr(config.model, "dense_layers", 0)))
    parallel, training = config.parallel, config.training
    gathers = parallel.tensor, parallel.context, parallel.expert, parallel.sequence_parallel
    key = f"{first.model} {gathers} {training.micro_batch_size} {training.sequence_length} {training.activation_checkpointing} {run.fused}"
    if key not in cache:
        cache[key] = trace(
            first, fused=run.fused, fused_saves=True, copies=False, norm_kernel=False, breaks=False
        )  # frameworks have kernels that save as little
    return cache[key]


def dispatched(part: TracedPart, tensor: int, expert_tensor: int) -> TracedPart:
    """Return a part whose tokens are sent to their experts as Megatron-LM does it.

    There every tensor rank routes its slice of the sequence, while this project gathers the sequence first. Ranks that share an expert
    gather the tokens that they received, and reduce the results.

    Args:
        part: a traced part.
        tensor: tensor ranks.
        expert_tensor: ranks over which each expert is sharded.
    """
    if tensor == 1 or not any(isinstance(o, Collective) and o.axis == "expert" for o in part.operations):
        return part
    operations: list[Operation] = []
    for operation in part.operations:
        if not isinstance(operation, Collective):
            operations.append(operation)
        elif operation.axis == "expert":
            operations.append(replace(operation, bytes=operation.bytes / tensor))
            if expert_tensor > 1:  # a gathering before the experts costs as much as the reduction after them
                operations.append(replace(operation, kind="all_gather", axis="tensor"))
        else:  # those of attention remain, half of all
            operations.append(replace(operation, bytes=operation.bytes / 2))
    return replace(part, operations=operations)


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
        except Exception as error:  # a defect in one row does not cost the others their predictions
            row["refused"] = f"the planner failed: {type(error).__name__}: {error}"
            refused += 1
        else:
            row["predicted_step_time_s"] = f"{result.step_time:.5g}"
            row["predicted_mfu"] = f"{result.flops / result.step_time / run.layout.world_size / run.hardware.tflops / 1e12:.4g}"
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
        raise UserError.of("rows", source, f"cannot be read as CSV: {error}", "pass a CSV file with a header line") from error
    if missing := [name for name in REQUIRED if name not in columns]:
        rule = f"has no column {', '.join(missing)}"
        raise UserError.of("rows", source, rule, "tools/study/README.md lists the columns")
    return rows, columns
