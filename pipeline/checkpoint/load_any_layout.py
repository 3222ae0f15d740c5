"""Loads a checkpoint of any layout into the fragments of this rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.checkpoint import native
from pipeline.checkpoint.fragments import Fragment, extract_fragment
from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common.errors import DamagedCheckpointError, UserError, Violation


def load(checkpoint: Checkpoint | MergedWeights, fragments: list[Fragment]) -> None:
    """Read a checkpoint of any layout into this rank's fragments, in place; every rank calls this.

    Raises:
        DamagedCheckpointError: on every rank, with the violations of all ranks: a file is missing or corrupt, a weight is missing or has
            another shape.
    """
    own: tuple[Violation, ...] = ()
    try:
        _read(checkpoint, fragments)
    except UserError as error:
        own = error.violations
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, own)
    violations = list(dict.fromkeys(violation for answer in answers for violation in answer))
    if violations:
        raise DamagedCheckpointError(violations)


@torch.no_grad()
def _read(checkpoint: Checkpoint | MergedWeights, fragments: list[Fragment]) -> None:
    """Read a fragment directly if the file of the same rank holds it; else extract it from the consolidated weight."""
    rank = dist.get_rank()
    for fragment in fragments:
        name, count = fragment.piece.name, fragment.tensors["weight"].numel()
        geometry = native.describe(fragment.piece, fragment.start, count)
        for kind in fragment.tensors:
            values: Tensor | None = checkpoint.fragment(rank, name, geometry, kind)
            if values is None:
                values = extract_fragment(checkpoint.tensor(name, kind), fragment.piece, fragment.start, count)
            fragment.tensors[kind].copy_(values)
