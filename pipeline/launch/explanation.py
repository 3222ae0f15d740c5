"""The last lines of a job that failed: which rank failed first, why, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from pipeline.launch.rank_step import StepEnd
from pipeline.launch.recovery import Action


def lines(stage: str, ended: StepEnd, action: Action, lost: Sequence[str], run_dir: Path | None, step: int) -> list[str]:
    """Return at most five lines.

    Args:
        stage: its name.
        ended: how the ranks ended.
        action: what follows.
        lost: nodes that do not answer.
        run_dir: of a training run.
        step: of its newest checkpoint, -1 for none.
    """
    first = ended.first
    found = [] if first is not None else ended.lines[-1:]  # then the messages of srun are all there is
    if first is not None and not first.final:  # the message of a final one is above
        moment = datetime.fromtimestamp(first.time).isoformat(sep=" ", timespec="seconds")
        what = "lost its peers" if first.follows else "failed first"
        found.append(f"{stage}: rank {first.rank} on {first.host} {what}, at {moment}: {first.reason}")
        found += [f"  at {first.where}"] if first.where else []
    found += [f"  nodes that do not answer: {', '.join(lost)}"] if lost else []
    found += [f"  newest checkpoint: step {step} of {run_dir}"] if run_dir is not None and step >= 0 else []
    return [*found, f"{stage}: exit code {ended.code}; {action.kind}: {action.reason}"]
