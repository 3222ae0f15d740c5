"""What differs between a run that had a fault and one that had none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint import native
from pipeline.checkpoint.difference import compare as compare_checkpoints
from pipeline.checkpoint.reader import Checkpoint

#: Keys of a line of metrics.jsonl that do not depend on the time.
EXACT = ("step", "samples", "loss", "grad_norm", "lr", "skipped")


def difference(checkpoint: Path, run_dir: Path, tolerance: float = 0.0) -> str:
    """What differs in a checkpoint from that of the same step of another run; empty if counters are equal, and weights and moments alike.

    Args:
        checkpoint: a folder.
        run_dir: of a run with all its checkpoints.
        tolerance: norm of the difference of two tensors over the norm of the right one. At 0, a tensor is also looked for in the other
            checkpoints of that run: it is stale if it is there.
    """
    try:
        found = compare_checkpoints(native.folder_of(run_dir, native.step_of(checkpoint)), checkpoint, read=True)
        for key, (right, mine) in found.settings.items():
            if key.startswith("train_state."):
                return f"{checkpoint.name}: {key} is {mine}, not {right}"
        wrong = next((tensor for tensor in found.tensors if tensor.reason or tensor.norm > tolerance), None)
        if wrong is None:
            return ""
        how = wrong.reason or f"differs by {wrong.norm:.1e}"
        if not wrong.reason and not tolerance:
            mine = Checkpoint(checkpoint).tensor(wrong.name, wrong.kind)
            same = [folder for folder in native.complete(run_dir) if torch.equal(mine, Checkpoint(folder).tensor(wrong.name, wrong.kind))]
            how = "differs" + (f"; it is that of {same[-1].name}" if same else "")
        return f"{checkpoint.name}: {wrong.kind} of {wrong.name} {how}"
    except Exception as error:  # a damaged checkpoint is a finding, not the end of the tool
        return f"{checkpoint.name}: {error}"


def last_line(run_dir: Path) -> int:
    """The last step in metrics.jsonl; 0 without one."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        return max((json.loads(line).get("step", 0) for line in lines[-2:]), default=0)
    except (OSError, ValueError):
        return 0


def steps_with_index(run_dir: Path) -> list[int]:
    """Steps of the folders with an index, by listing: independent of the catalog."""
    return sorted(int(path.parent.name[5:]) for path in (run_dir / "checkpoints").glob("step-????????/index.json"))


def exact(run_dir: Path) -> list[tuple[Any, ...]]:
    """The lines of metrics.jsonl, without times."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [tuple(line.get(key) for key in EXACT) if "loss" in line else (line["step"], line["validation_loss"]) for line in lines]


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
    tolerance = 0.0 if same_layout else TOLERANCE
    problems = _compare_metrics(run_dir, undisturbed, tolerance)
    ours, theirs = native.complete(run_dir), {native.step_of(folder) for folder in native.complete(undisturbed)}
    if not ours or native.step_of(ours[-1]) != max(theirs):
        return [*problems, f"the newest checkpoint is {ours[-1].name if ours else 'missing'}"]
    for folder in ours:
        if native.step_of(folder) in theirs:
            problems += filter(None, [difference(folder, undisturbed, tolerance)])
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
