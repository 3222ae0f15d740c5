"""The effect of a mutant: in what its training differs from the same training without it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

#: A mutant has an effect if something differs by more, relative to its size: rounding in another order is below.
SMALLEST = 1e-5
#: Values of a line of metrics.jsonl -> what they are called in the table.
SCALARS = {"loss": "loss", "grad_norm": "norm", "lr": "rate", "validation_loss": "validation"}
#: Kinds of tensors in a checkpoint -> what they are called.
KINDS = {"weight": "weights", **dict.fromkeys(("exp_avg", "exp_avg_sq", "exp_avg_slow", "offset"), "moments"), "ema": "average"}


def scalars(run_dir: Path, other: Path) -> dict[str, float]:
    """Return the largest relative difference of every kind of value in metrics.jsonl; inf if one run has it and the other has not."""
    found: dict[str, float] = {}
    for key, name in SCALARS.items():
        values = [_values(folder, key) for folder in (run_dir, other)]
        if values[0].keys() != values[1].keys():
            found[name] = math.inf
        elif values[0]:
            found[name] = max(ratio(value - values[1][step], values[1][step]) for step, value in values[0].items())
    return found


def _values(run_dir: Path, key: str) -> dict[int, float]:
    """Step -> value. Of a step that was done twice, the last one."""
    lines: list[dict[str, Any]] = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if isinstance(line.get(key), int | float)}


def tensors(run_dir: Path, other: Path) -> dict[str, float]:
    """Return the largest relative difference of a weight and of a moment in the checkpoints; imports the pipeline."""
    from pipeline.checkpoint import difference, native

    found = dict.fromkeys(KINDS.values(), 0.0)
    steps = [[native.step_of(folder) for folder in native.complete(each)] for each in (run_dir, other)]
    if steps[0] != steps[1]:
        return {"checkpoints": math.inf}
    for step in steps[0]:
        folders = native.folder_of(other, step), native.folder_of(run_dir, step)
        for tensor in difference.compare(*folders, settings=False, read=True).tensors:
            if not tensor.reason:
                found[KINDS[tensor.kind]] = max(found[KINDS[tensor.kind]], tensor.norm)
            elif tensor.reason != "not in A":  # the state of a weight that only the mutant trains
                return {"checkpoints": math.inf}
    return found


def write_tensors(run_dir: Path, other: Path, path: Path) -> None:
    """Write the result of `tensors` to a file; for a process that may import the pipeline."""
    path.write_text(json.dumps(tensors(run_dir, other)))


def ratio(difference: float, size: float) -> float:
    """Return |difference| / |size|: 0 without a difference, inf if it is not a finite number."""
    if difference == 0:
        return 0.0
    found = abs(difference) / abs(size) if size else math.inf
    return found if math.isfinite(found) else math.inf


def largest(found: dict[str, float]) -> str:
    """The largest difference, as text: "weights 1.2e-02"."""
    name = max(found, key=lambda key: found[key])
    return f"{name} {found[name]:.1e}"
