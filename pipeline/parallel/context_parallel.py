"""Context parallelism: each rank of a group holds a shard of every sequence; only attention communicates.

All layers except attention process tokens independently. The batch is sharded along the sequence, each attention core is replaced by
one that communicates with the other ranks, as is what mixes the tokens in linear attention, and the replicated weights average their
gradients as over data ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeline.layers.batch import Batch
from pipeline.layers.gated_delta_net import GatedDeltaNet
from pipeline.layers.loss import IGNORE
from pipeline.parallel.linear_attention import ContextMixing
from pipeline.parallel.ring_attention import RingCore
from pipeline.parallel.ring_layout import token_positions
from pipeline.parallel.ulysses import UlyssesCore

#: Entries of a batch with one value per token; the others have one value per sequence.
PER_TOKEN = ("targets", "documents", "segments")


def apply(model: nn.Module, group: ProcessGroup, kind: str) -> None:
    """Replace the core of every attention layer, and the mixing of every linear attention, by a context-parallel one.

    Args:
        model: its layers have their local cores already, and heads that are sharded by tensor parallelism.
        group: the context-parallel group.
        kind: ring or ulysses.
    """
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if isinstance(module, GatedDeltaNet):
            module.mix = ContextMixing(group, 2 if kind == "ring" else 1, module.kernel)
        elif (core := getattr(module, "core", None)) is not None:
            module.core = RingCore(group) if kind == "ring" else UlyssesCore(core, group)


def shard_sequence(tokens: Tensor, batch: Batch, group: ProcessGroup, kind: str, micro_batches: int) -> tuple[Tensor, Batch]:
    """Return the local shard of every sequence.

    With the ring, each rank holds two chunks of a sequence, an early and a late one, since late tokens attend to more keys. Ulysses
    exchanges tokens for heads and requires contiguous shards.

    Args:
        tokens: int64 (sequences, sequence), the same on all context ranks.
        batch: the other model inputs, with targets.
        group: the context-parallel group.
        kind: ring or ulysses.
        micro_batches: number of micro-batches; each has its own mean loss.

    Returns:
        Tokens (sequences, sequence / ranks), and the batch with positions. The batch also has a loss_scale, since the shards of a sequence
        may have different numbers of counted targets.
    """
    local_tokens = tokens.shape[1] // group.size()
    positions = token_positions(group.rank(), group.size(), local_tokens, tokens.device)
    if kind == "ulysses":
        positions = torch.arange(local_tokens, device=tokens.device) + group.rank() * local_tokens
    local: Batch = batch.copy()
    for name in PER_TOKEN:
        if name in batch:
            local[name] = batch[name][:, positions]  # type: ignore[literal-required] # the names are Batch's
    # Those of the batch, which begin at 0 in every packed example, are for embeddings; attention masks have the places in the sequence.
    local["positions"] = batch["positions"][:, positions] if "positions" in batch else positions.expand(len(tokens), -1)
    if "loss_scale" not in batch:
        local["loss_scale"] = _loss_scale(batch["targets"], micro_batches)
    return tokens[:, positions], local


def _loss_scale(targets: Tensor, micro_batches: int) -> Tensor:
    """Return Batch's loss_scale: per micro-batch, the number of tokens over the number of counted targets."""
    chunks = targets.unflatten(0, (micro_batches, -1)).flatten(1)
    scale = chunks.shape[1] / (chunks != IGNORE).sum(dim=1).clamp(min=1)
    return scale.repeat_interleave(len(targets) // micro_batches)
