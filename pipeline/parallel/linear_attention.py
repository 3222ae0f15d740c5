"""Linear attention over sequences that are sharded over a context-parallel group.

Each part of a sequence maps the state before it to the state after it (layers/delta_rule.py). The ranks gather the maps of all parts and
compose those before their own. A map has the size of the states of the heads, so what is sent does not depend on the length of the
sequence. The convolutions read the last inputs of the part before, which are gathered too.

The backward pass of a gathering is a reduce-scatter: a map, or an input, has gradients from the ranks of all later parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from pipeline.layers.delta_rule import delta_rule_of_part
from pipeline.layers.gated_delta_net import GatedDeltaNet, number_segments
from pipeline.layers.mask import Mask
from pipeline.parallel import collectives


@dataclass(frozen=True)
class ContextMixing:
    """Mixes the local tokens (Mixing, layers/gated_delta_net.py).

    Attributes:
        group: the context-parallel group.
        parts: contiguous parts of a sequence on each rank: 2 with the ring (ring_layout.py), whose parts are computed as further
            sequences of a batch, and 1 with Ulysses.
        kernel: of the layer's convolutions.
    """

    group: ProcessGroup
    parts: int
    kernel: int

    def __call__(self, layer: GatedDeltaNet, qkv: Tensor, log_decay: Tensor, beta: Tensor, mask: Mask) -> Tensor:
        """See Mixing; the mask has the documents of the local tokens."""
        inputs = torch.cat([self._before(qkv, self.kernel - 1), self._split(qkv)], dim=1)
        segments = self._segments(mask)
        outputs = delta_rule_of_part(
            *layer.heads(inputs, self._split(log_decay), self._split(beta), None if segments is None else segments[:, 1:]),
            self._state_before,
            segments=None if segments is None else segments[:, self.kernel :],
            segment_before=None if segments is None else segments[:, self.kernel - 1],
        )
        return outputs.transpose(1, 2).to(qkv.dtype).unflatten(0, (-1, self.parts)).flatten(1, 2)

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

    def _state_before(self, transition: Tensor, state: Tensor) -> Tensor:
        """Return the state before each part from the map of each part; see delta_rule_of_part. Before the sequence, it is zero."""
        maps = self._gather(torch.cat([transition, state], dim=3).unflatten(0, (-1, self.parts)))
        transitions, states = maps.split([transition.shape[3], state.shape[3]], dim=4)
        before = [torch.zeros_like(states[:, 0])]
        for onward, added in zip(transitions.unbind(1)[:-1], states.unbind(1)[:-1], strict=True):
            before.append(added + onward @ before[-1])
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
