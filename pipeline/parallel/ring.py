"""Ring attention (Liu et al. 2023, https://arxiv.org/abs/2310.01889): keys and values travel from rank to rank, queries stay.

Each rank holds two of 2n chunks of every sequence, number r and number 2n-1-r (parallel/context.py). Under a causal mask each step of the
ring is then the same work on every rank: its own keys under the mask, then either all of its queries with the first half of the
arrived keys (they come from a lower rank) or the second half of its queries with all of them (from a higher rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from pipeline.layers import partial_attention
from pipeline.layers.mask import Mask
from pipeline.parallel import collectives


@dataclass(frozen=True)
class RingCore:
    """An attention core over the tokens of all ranks of a group; each gives and gets its own tokens."""

    group: ProcessGroup

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, window: int | None = None, scale: float | None = None) -> Tensor:
        """See Core (layers/attention.py); the mask's documents are those of this rank's tokens, its slopes those of the heads."""
        assert mask.bias is None, "a bias for each query and key is not cut along the sequence"
        assert mask.key_documents is None, "the ring is for attention to oneself"
        assert mask.key_positions is None, "the ring is for attention to oneself"
        out: Tensor = _Ring.apply(q, k, v, RingPlan(self.group, q.shape[2], q.device, mask, window), scale)
        return out


@dataclass(frozen=True)
class Part:
    """What a rank computes at one step of the ring: `queries` of its own towards `keys` of those that arrived, under a mask."""

    queries: slice
    keys: slice
    mask: Mask


@dataclass(frozen=True)
class RingPlan:
    """The ranks that a sequence is cut over, and what this one has to do with the keys of each.

    Attributes:
        group: the ranks.
        tokens: of each.
        device: where they are.
        mask: of this rank's tokens.
        window: as in Mask.visible.
    """

    group: ProcessGroup
    tokens: int
    device: torch.device
    mask: Mask
    window: int | None

    def source(self, step: int) -> int:
        """Whose keys are here after so many steps."""
        return (self.group.rank() - step) % self.group.size()

    def part(self, step: int) -> Part | None:
        """What there is to compute at a step, None when no query sees a key."""
        rank, source = self.group.rank(), self.source(step)
        half, everything = self.tokens // 2, slice(0, self.tokens)
        if not self.mask.causal or self.mask.prefix is not None:
            return Part(everything, everything, self._towards(source, everything, everything))
        apart = abs(rank - source)
        if self.window is not None and (apart - 1) * half + 1 >= self.window:
            return None  # the nearest of its keys is too far back
        queries = everything if source <= rank else slice(half, self.tokens)
        keys = everything if source >= rank else slice(0, half)
        return Part(queries, keys, self._towards(source, queries, keys))

    def _towards(self, source: int, queries: slice, keys: slice) -> Mask:
        """The mask of some queries towards some keys of another rank."""
        mask = self.mask
        plain = mask.documents is None and mask.slopes is None and self.window is None and mask.prefix is None
        if plain:
            return Mask(causal=mask.causal and source == self.group.rank())
        ranks, here = self.group.size(), self.group.rank()
        theirs = None if mask.documents is None else self._documents()[source][:, keys]
        return mask.replace(
            documents=None if mask.documents is None else mask.documents[:, queries],
            key_documents=theirs,
            positions=places(here, ranks, self.tokens, self.device)[None, queries],
            key_positions=places(source, ranks, self.tokens, self.device)[None, keys],
        )

    def _documents(self) -> list[Tensor]:
        """Those of every rank's tokens, exchanged once for all blocks."""
        documents = self.mask.documents
        assert documents is not None
        found: list[Tensor] = self.mask.cached("documents of the ring", lambda: collectives.gather(documents, self.group))
        return found


def places(rank: int, ranks: int, tokens: int, device: torch.device) -> Tensor:
    """Positions of a rank's tokens in the whole sequence, int64 (tokens,): chunks `rank` and `2 ranks - 1 - rank` of 2 `ranks`."""
    half = tokens // 2
    chunk = torch.arange(half, device=device)
    return torch.cat((chunk + rank * half, chunk + (2 * ranks - 1 - rank) * half))


class _Ring(torch.autograd.Function):
    """Softmax attention over a ring; the backward pass sends keys, values and the gradients that they collect around once more."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, scale: float | None) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=wide, device=q.device)
        total = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
        ranks, width = plan.group.size(), k.shape[3]
        here = torch.cat((k, v), dim=3)
        for step in range(ranks):
            coming = _RingExchange(here, plan.group) if step < ranks - 1 else None
            if (part := plan.part(step)) is not None:
                rows = part.queries
                keys, values = here[:, :, part.keys].split((width, v.shape[3]), dim=3)
                some = partial_attention.forward(q[:, :, rows], keys, values, part.mask, window=plan.window, scale=scale)
                out[:, :, rows], total[:, :, rows] = partial_attention.merge(out[:, :, rows], total[:, :, rows], *some)
            if coming is not None:
                here = coming.arrived()
        out = out.to(v.dtype)
        ctx.plan, ctx.scale = plan, scale
        ctx.save_for_backward(q, k, v, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total = ctx.saved_tensors
        plan: RingPlan = ctx.plan
        ranks, widths = plan.group.size(), (k.shape[3], v.shape[3])
        grad_q = torch.zeros_like(q, dtype=total.dtype)
        here = torch.cat((k, v), dim=3)
        collected: _RingExchange | None = None
        for step in range(ranks):
            coming = _RingExchange(here, plan.group) if step < ranks - 1 else None
            own = torch.zeros_like(here, dtype=total.dtype)
            if (part := plan.part(step)) is not None:
                rows = part.queries
                keys, values = here[:, :, part.keys].split(widths, dim=3)
                some = partial_attention.backward(
                    grad[:, :, rows],
                    q[:, :, rows],
                    keys,
                    values,
                    out[:, :, rows],
                    total[:, :, rows],
                    part.mask,
                    window=plan.window,
                    scale=ctx.scale,
                )
                grad_q[:, :, rows] += some[0]
                own[:, :, part.keys] = torch.cat(some[1:], dim=3).to(total.dtype)
            # The gradients follow their keys one step behind; the last hop brings them home.
            if collected is not None:
                own += collected.arrived()
            collected = _RingExchange(own, plan.group, tag=1)
            if coming is not None:
                here = coming.arrived()
        assert collected is not None
        grad_k, grad_v = collected.arrived().split(widths, dim=3)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


class _RingExchange:
    """A tensor on its way to the next rank, while the previous rank's comes here.

    Two may be on their way at once, keys with values and the gradients that follow them, so each kind has a tag of its own.
    """

    def __init__(self, tensor: Tensor, group: ProcessGroup, tag: int = 0) -> None:
        self._sent = tensor.contiguous()
        self._received = torch.empty_like(self._sent)
        self._work: list[Any] = []
        if group.size() == 1:
            self._received = self._sent
            return
        rank, ranks = group.rank(), group.size()
        send = dist.P2POp(dist.isend, self._sent, group=group, group_peer=(rank + 1) % ranks, tag=tag)
        receive = dist.P2POp(dist.irecv, self._received, group=group, group_peer=(rank - 1) % ranks, tag=tag)
        self._work = dist.batch_isend_irecv([send, receive])

    def arrived(self) -> Tensor:
        """What the previous rank sent."""
        for work in self._work:
            work.wait()
        return self._received
