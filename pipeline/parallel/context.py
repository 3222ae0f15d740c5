"""Context parallelism: the ranks of a group share every sequence's tokens, and attention is where they meet.

Everything but attention works on each token alone. So the batch is cut along the sequence, the cores of attention are swapped for ones
that reach the other ranks' tokens, and the weights, whole on every rank, get the mean of their gradients as over data ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pipeline.layers.batch import Batch
from pipeline.layers.loss import IGNORE
from pipeline.parallel.ring import RingCore, places
from pipeline.parallel.ulysses import UlyssesCore

#: What a batch has for each token; the rest it has for each sequence.
BY_TOKEN = ("targets", "documents", "segments")


def apply(layers: Iterable[Any], group: ProcessGroup, kind: str) -> None:
    """Swap the core of every attention layer.

    Args:
        layers: modules with a `core`, their heads cut by tensor parallelism already.
        group: the context ranks.
        kind: ring or ulysses.
    """
    for layer in layers:
        layer.core = RingCore(group) if kind == "ring" else UlyssesCore(layer.core, group)


def shard_sequence(tokens: Tensor, batch: Batch, group: ProcessGroup, kind: str, micro_batches: int) -> tuple[Tensor, Batch]:
    """This rank's tokens of every sequence and what belongs to them.

    Ranks of a ring take two chunks each, an early and a late one, since late tokens see more keys; ulysses swaps tokens away and wants them
    in order.

    Args:
        tokens: int64 (sequences, sequence), the same on all context ranks.
        batch: what belongs to them, with targets.
        group: the context ranks.
        kind: ring or ulysses.
        micro_batches: parts of the batch, each with a mean loss of its own.

    Returns:
        Tokens (sequences, sequence / ranks), and the batch with positions; with a loss_scale too, since the parts of a sequence may have
        different numbers of counted targets.
    """
    assert "positions" not in batch, "under context parallelism positions tell where a token was cut out"
    own = tokens.shape[1] // group.size()
    rows = places(group.rank(), group.size(), own, tokens.device)
    if kind == "ulysses":
        rows = torch.arange(own, device=tokens.device) + group.rank() * own
    mine: Batch = batch.copy()
    for name in BY_TOKEN:
        if name in batch:
            mine[name] = batch[name][:, rows]  # type: ignore[literal-required] # the names are Batch's
    mine["positions"] = rows.expand(len(tokens), -1)
    if "loss_scale" not in batch:
        mine["loss_scale"] = _loss_scale(batch["targets"], micro_batches)
    return tokens[:, rows], mine


def _loss_scale(targets: Tensor, micro_batches: int) -> Tensor:
    """Batch's loss_scale, of each micro-batch."""
    parts = targets.unflatten(0, (micro_batches, -1)).flatten(1)
    scale = parts.shape[1] / (parts != IGNORE).sum(dim=1).clamp(min=1)
    return scale.repeat_interleave(len(targets) // micro_batches)
