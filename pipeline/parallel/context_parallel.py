"""Context parallelism: each rank of a group holds a shard of every sequence; only attention communicates.

All layers except attention process tokens independently. The batch is sharded along the sequence, each attention core is replaced by
one that communicates with the other ranks, as is what mixes the tokens in layers with a recurrent state, and the replicated weights
average their gradients as over data ranks.

Each part of a sequence maps the state before it to the state after it (layers/recurrent.py). The ranks gather the maps of all parts and
compose those before their own. A map has the size of the states of the heads, so what is sent does not depend on the length of the
sequence. The convolutions read the last inputs of the part before, which are gathered too.

The backward pass of a gathering is a reduce-scatter: a map, or an input, has gradients from the ranks of all later parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeline.layers import attention_kernel
from pipeline.layers.attention import Core
from pipeline.layers.batch import Batch
from pipeline.layers.loss import IGNORE
from pipeline.layers.mask import Mask
from pipeline.layers.recurrent import RecurrentLayer, number_segments
from pipeline.parallel import collectives
from pipeline.parallel.ring_attention import RingCore
from pipeline.parallel.ring_layout import token_positions

#: Entries of a batch with one value per token; the others have one value per sequence.
PER_TOKEN = ("targets", "documents", "segments", "teacher_tokens", "teacher_log_probabilities")


def apply(model: nn.Module, group: ProcessGroup, kind: str) -> None:
    """Replace the core of every attention layer, and the mixing of every layer with a recurrent state, by a context-parallel one.

    Args:
        model: its layers have their local cores already, and heads that are sharded by tensor parallelism.
        group: the context-parallel group.
        kind: ring or ulysses.
    """
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if isinstance(module, RecurrentLayer):
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
    positions = local_positions(tokens.shape[1], group, kind, tokens.device)
    local: Batch = batch.copy()
    for name in PER_TOKEN:
        if name in batch:
            local[name] = batch[name][:, positions]  # type: ignore[literal-required] # the names are Batch's
    # Those of the batch, which begin at 0 in every packed example, are for embeddings; attention masks have the places in the sequence.
    local["positions"] = batch["positions"][:, positions] if "positions" in batch else positions.expand(len(tokens), -1)
    if "loss_scale" not in batch:
        local["loss_scale"] = _loss_scale(batch["targets"], micro_batches)
    return tokens[:, positions], local


def local_positions(length: int, group: ProcessGroup, kind: str, device: torch.device) -> Tensor:
    """Return the positions of a rank's tokens in a sequence, int64 (length / ranks,); arguments as in shard_sequence."""
    local_tokens = length // group.size()
    if kind == "ulysses":
        return torch.arange(local_tokens, device=device) + group.rank() * local_tokens
    return token_positions(group.rank(), group.size(), local_tokens, device)


def _loss_scale(targets: Tensor, micro_batches: int) -> Tensor:
    """Return Batch's loss_scale: per micro-batch, the number of tokens over the number of counted targets."""
    chunks = targets.unflatten(0, (micro_batches, -1)).flatten(1)
    scale = chunks.shape[1] / (chunks != IGNORE).sum(dim=1).clamp(min=1)
    return scale.repeat_interleave(len(targets) // micro_batches)


@dataclass(frozen=True)
class UlyssesCore:
    """An attention core that runs another core on all tokens of some heads. Rank r holds the r-th contiguous shard of each sequence."""

    inner: Core
    group: ProcessGroup

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: Mask,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See Core (layers/attention.py); the mask has the documents of the local tokens, and slopes and sinks are those of all heads."""
        full_mask = self._full_mask(mask)
        q, k, v = (collectives.scatter_heads_gather_sequence(x, self.group) for x in (q, k, v))
        # Of the other heads the gradient is zero here: the ranks add theirs, as for every weight.
        local_sinks = None if sinks is None else sinks.chunk(self.group.size())[self.group.rank()]
        output = self.inner(q, k, v, full_mask, window=window, scale=scale, sinks=local_sinks)
        return collectives.scatter_sequence_gather_heads(output, self.group)

    def prepare(
        self, mask: Mask, window: int | None, shape: tuple[int, int, int] | None, device: torch.device, *, sinks: bool = False
    ) -> None:
        """Gather the documents of all tokens and compute their mask; see prepare (layers/attention_kernel.py)."""
        ranks = self.group.size()
        full = None if shape is None else (shape[0], ranks * shape[1], ranks * shape[2])
        attention_kernel.prepare(self.inner, self._full_mask(mask), window, full, device, sinks=sinks)

    def _full_mask(self, mask: Mask) -> Mask:
        """The mask of full sequences, computed once."""
        full: Mask = mask.cached("of all tokens", lambda: self._compute_full_mask(mask))
        return full

    def _compute_full_mask(self, mask: Mask) -> Mask:
        """The mask of full sequences, with positions that start at 0, and the slopes of the local heads."""
        assert mask.bias is None, "ulysses does not shard a bias per query and key"
        assert mask.key_documents is None, "ulysses supports self-attention only"
        documents = None if mask.documents is None else torch.cat(collectives.all_gather(mask.documents, self.group), dim=1)
        slopes = None if mask.slopes is None else mask.slopes.chunk(self.group.size())[self.group.rank()]
        return mask.replace(documents=documents, positions=None, slopes=slopes)


@dataclass(frozen=True)
class ContextMixing:
    """Mixes the local tokens (Mixing, layers/recurrent.py).

    Attributes:
        group: the context-parallel group.
        parts: contiguous parts of a sequence on each rank: 2 with the ring (ring_layout.py), whose parts are computed as further
            sequences of a batch, and 1 with Ulysses.
        kernel: of the layer's convolutions.
    """

    group: ProcessGroup
    parts: int
    kernel: int

    def __call__(self, layer: RecurrentLayer, inputs: Tensor, *gates: Tensor, mask: Mask) -> Tensor:
        """See Mixing; the mask has the documents of the local tokens."""
        joined = torch.cat([self._before(inputs, self.kernel - 1), self._split(inputs)], dim=1)
        segments = self._segments(mask)
        outputs = layer.rule_of_part(
            *layer.heads(joined, *map(self._split, gates), segments=None if segments is None else segments[:, 1:]),
            partial(self._state_before, layer),
            segments=None if segments is None else segments[:, self.kernel :],
            segment_before=None if segments is None else segments[:, self.kernel - 1],
        )
        return outputs.transpose(1, 2).to(inputs.dtype).unflatten(0, (-1, self.parts)).flatten(1, 2)

    def prepare(self, mask: Mask, *_others: Any, **_more: Any) -> None:
        """Gather the documents of the tokens before the parts; see prepare (layers/attention_kernel.py)."""
        self._segments(mask)

    def _segments(self, mask: Mask) -> Tensor | None:
        """Return the number of the document of each token of the parts and of `kernel` tokens before them; None without documents.

        int64 (batch x parts, kernel + tokens of a part). With a kernel of one token, the state still depends on that of the token before.
        """
        documents = mask.documents
        if documents is None:
            return None

        def compute() -> Tensor:
            before = self._before(documents.unsqueeze(2), self.kernel).squeeze(2)
            return number_segments(torch.cat([before, self._split(documents)], dim=1))

        segments: Tensor = mask.cached(("segments of the parts", self.kernel), compute)
        return segments

    def _split(self, x: Tensor) -> Tensor:
        """(batch, tokens, ...) -> (batch x parts, tokens of a part, ...)."""
        return x.unflatten(1, (self.parts, -1)).flatten(0, 1)

    def _before(self, x: Tensor, count: int) -> Tensor:
        """Return the last `count` tokens before each part; zeros before the sequence.

        (batch, tokens, width) -> (batch x parts, count, width). Parts may be shorter than `count`.
        """
        parts = x.unflatten(1, (self.parts, -1))
        last = parts[:, :, max(parts.shape[2] - count, 0) :]
        if count == 0:
            return last.flatten(0, 1)
        sequence = F.pad(self._gather(last).flatten(1, 2), (0, 0, count, 0))
        starts = [place * last.shape[2] for place in self._places()]
        return torch.stack([sequence[:, start : start + count] for start in starts], dim=1).flatten(0, 1)

    def _state_before(self, layer: RecurrentLayer, transition: Tensor, state: Tensor) -> Tensor:
        """Return the state before each part from the map of each part; see StateBefore. Before the sequence, it is zero."""
        maps = self._gather(torch.cat([transition, state], dim=3).unflatten(0, (-1, self.parts)))
        transitions, states = maps.split([transition.shape[3], state.shape[3]], dim=4)
        before = [torch.zeros_like(states[:, 0])]
        for onward, added in zip(transitions.unbind(1)[:-1], states.unbind(1)[:-1], strict=True):
            before.append(added + layer.carry(onward, before[-1]))
        # All of them are stacked: the backward pass of every rank reduces, also that of a rank that needs none of the maps.
        every = torch.stack(before, dim=1)
        return torch.stack([every[:, place] for place in self._places()], dim=1).flatten(0, 1)

    def _gather(self, x: Tensor) -> Tensor:
        """(batch, parts, ...) on each rank -> (batch, parts of all ranks in the order of the sequence, ...)."""
        gathered = collectives.gather_sequence(x, self.group).unflatten(1, (-1, self.parts))
        return gathered.squeeze(2) if self.parts == 1 else torch.cat([gathered[:, :, 0], gathered[:, :, 1].flip(1)], dim=1)

    def _places(self) -> list[int]:
        """The places of this rank's parts in the sequence."""
        rank = self.group.rank()
        return [rank] if self.parts == 1 else [rank, 2 * self.group.size() - 1 - rank]
