"""Loads a checkpoint of any layout into the fragments of this rank, which reads the ranges of bytes that it needs."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint.contents import read_contents
from pipeline.checkpoint.fragments import Fragment
from pipeline.checkpoint.grown_weights import GrownWeights
from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.checkpoint.reader import Checkpoint, WantedRun
from pipeline.common.errors import DamagedCheckpointError, UserError, Violation
from pipeline.parallel.mesh import gather_objects, on_rank_0


def open_on_all_ranks(path: Path) -> Checkpoint:
    """Open a checkpoint; rank 0 reads its index for all. Every rank calls this.

    Raises:
        DamagedCheckpointError: on every rank: the index is not readable.
    """
    try:
        return Checkpoint(path, on_rank_0(lambda: read_contents(path)))
    except UserError as error:
        raise DamagedCheckpointError(error.violations) from error


def load(checkpoint: Checkpoint | MergedWeights | GrownWeights, fragments: list[Fragment]) -> None:
    """Read a checkpoint of any layout into this rank's fragments, in place; every rank calls this.

    Raises:
        DamagedCheckpointError: on every rank, with the violations of all ranks: a file is missing or corrupt, a weight is missing or has
            another shape.
    """
    local: tuple[Violation, ...] = ()
    try:
        checkpoint.read([WantedRun.of(fragment) for fragment in fragments])
    except UserError as error:
        local = error.violations
    violations = list(dict.fromkeys(violation for answer in gather_objects(local) for violation in answer))
    if violations:
        raise DamagedCheckpointError(violations)
