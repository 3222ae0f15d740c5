"""What others want of the checkpoints of a run; the training loop knows no evaluation and no Slurm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CheckpointHooks:
    """Further checkpoints of a run, and what follows them.

    Attributes:
        writes: whether the checkpoint of a step is written besides those that the run writes anyway; the same on all ranks.
        keeps: whether an older checkpoint is not removed yet; called on rank 0.
        written: called on rank 0 when a run begins, and after a checkpoint of `writes` was written. All ranks wait for it.
        finished: called on rank 0 when a run is complete: waits for what `written` has begun.
    """

    writes: Callable[[int], bool] = lambda _: False
    keeps: Callable[[Path], bool] = lambda _: False
    written: Callable[[], None] = lambda: None
    finished: Callable[[], None] = lambda: None
