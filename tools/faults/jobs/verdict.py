"""Whether a run that had a fault ended as one that had none."""

from __future__ import annotations

from pathlib import Path

import torch

from pipeline.checkpoint import native
from tools.faults.runs import difference, exact, first_difference

#: Relative differences in another layout, which sums in another order.
TOLERANCE = 1e-5


def compare(run_dir: Path, undisturbed: Path, *, same_layout: bool) -> list[str]:
    """What differs between two complete runs: metrics (all but times), checkpoints, and what is left in the folder.

    Args:
        run_dir: of the run that had a fault.
        undisturbed: of a run without one, with all its checkpoints.
        same_layout: require equal bits.
    """
    if not (run_dir / "manifest.json").is_file():
        return ["manifest.json is missing"]
    problems = _compare_metrics(run_dir, undisturbed, 0.0 if same_layout else TOLERANCE)
    ours, theirs = native.complete(run_dir), {native.step_of(folder) for folder in native.complete(undisturbed)}
    if not ours or native.step_of(ours[-1]) != max(theirs):
        return [*problems, f"the newest checkpoint is {ours[-1].name if ours else 'missing'}"]
    for folder in ours:
        if native.step_of(folder) in theirs:
            wrong = difference(folder, undisturbed) if same_layout else _distance(folder, undisturbed)
            problems += [wrong] if wrong else []
    hidden = [str(path.relative_to(run_dir)) for path in run_dir.rglob(".*") if path.name not in (".lock", ".wandb_id")]
    return problems + ([f"leftovers: {hidden}"] if hidden else [])


def _compare_metrics(run_dir: Path, undisturbed: Path, tolerance: float) -> list[str]:
    """The first lines that differ. Steps and samples must be equal: none is repeated or missing."""
    ours, theirs = exact(run_dir), exact(undisturbed)
    if [line[0] for line in ours] != [line[0] for line in theirs]:
        return [f"metrics.jsonl has the steps {[line[0] for line in ours]}, not {[line[0] for line in theirs]}"]
    for mine, other in zip(ours, theirs, strict=True):
        counters = 2 if len(mine) > 2 else 1
        if mine[:counters] != other[:counters]:
            return [f"metrics.jsonl: step and samples {mine[:counters]}, not {other[:counters]}"]
        if any(abs(a - b) > tolerance * abs(b) for a, b in zip(mine[counters:], other[counters:], strict=True)):
            return [f"metrics.jsonl: {mine}, not {other}"]
    return []


def _distance(checkpoint: Path, undisturbed: Path) -> str:
    """The weight or moment that differs by more than rounding, relative to its norm, or a counter; empty if none does."""

    def unequal(_name: str, _kind: str, mine: torch.Tensor, other: torch.Tensor) -> str:
        norm = torch.linalg.vector_norm(other.double()).clamp(min=1e-30)
        distance = float(torch.linalg.vector_norm(mine.double() - other.double()) / norm)
        return f"differs by {distance:.1e}" if distance > TOLERANCE else ""

    return first_difference(checkpoint, undisturbed, unequal)
