"""Ring attention (Liu et al. 2023, https://arxiv.org/abs/2310.01889): keys and values rotate around the ring, queries stay local.

Each of n ranks holds two of 2n chunks of every sequence, chunks r and 2n-1-r (parallel/context.py). Under a causal mask, every step of the
ring then has the same cost on every rank: first the local keys under the mask, then either all local queries with the first half of the
received keys (if they belong to a lower rank) or the second half of the local queries with all received keys (a higher rank).
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
    """An attention core over sequences that are sharded over a group; inputs and output are the local tokens."""

    group: ProcessGroup

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, window: int | None = None, scale: float | None = None) -> Tensor:
        """See Core (layers/attention.py); the mask has the documents of the local tokens and the slopes of the local heads."""
        assert mask.bias is None, "ring attention does not shard a bias per query and key"
        assert mask.key_documents is None, "ring attention supports self-attention only"
        assert mask.key_positions is None, "ring attention supports self-attention only"
        out: Tensor = _Ring.apply(q, k, v, RingPlan(self.group, q.shape[2], q.device, mask, window), scale)
        return out


@dataclass(frozen=True)
class AttentionBlock:
    """The attention that a rank computes in one step of the ring: slices of its queries and of the received keys, and their mask."""

    queries: slice
    keys: slice
    mask: Mask


@dataclass(frozen=True)
class RingPlan:
    """The attention blocks that this rank computes, one for each source rank of keys and values.

    Attributes:
        group: the context-parallel group.
        tokens: local sequence length.
        device: device of the tokens.
        mask: the mask of the local tokens.
        window: as in Mask.visible.
    """

    group: ProcessGroup
    tokens: int
    device: torch.device
    mask: Mask
    window: int | None

    def source(self, step: int) -> int:
        """The rank whose keys and values this rank holds at a step."""
        return (self.group.rank() - step) % self.group.size()

    def block(self, step: int) -> AttentionBlock | None:
        """The attention block of a step, None when no query attends to any of its keys."""
        rank, source = self.group.rank(), self.source(step)
        half, full = self.tokens // 2, slice(0, self.tokens)
        if not self.mask.causal or self.mask.prefix is not None:
            return AttentionBlock(full, full, self._block_mask(source, full, full))
        distance = abs(rank - source)
        if self.window is not None and (distance - 1) * half + 1 >= self.window:
            return None  # even the nearest key is outside the window
        queries = full if source <= rank else slice(half, self.tokens)
        keys = full if source >= rank else slice(0, half)
        return AttentionBlock(queries, keys, self._block_mask(source, queries, keys))

    def _block_mask(self, source: int, queries: slice, keys: slice) -> Mask:
        """The mask between a slice of the local queries and a slice of the keys of rank `source`."""
        mask = self.mask
        plain = mask.documents is None and mask.slopes is None and self.window is None and mask.prefix is None
        if plain:
            return Mask(causal=mask.causal and source == self.group.rank())
        ranks, rank = self.group.size(), self.group.rank()
        key_documents = None if mask.documents is None else self._documents()[source][:, keys]
        return mask.replace(
            documents=None if mask.documents is None else mask.documents[:, queries],
            key_documents=key_documents,
            positions=token_positions(rank, ranks, self.tokens, self.device)[None, queries],
            key_positions=token_positions(source, ranks, self.tokens, self.device)[None, keys],
        )

    def _documents(self) -> list[Tensor]:
        """The documents of every rank's tokens; gathered once for all layers."""
        documents = self.mask.documents
        assert documents is not None
        gathered: list[Tensor] = self.mask.cached("documents of the ring", lambda: collectives.all_gather(documents, self.group))
        return gathered


def token_positions(rank: int, ranks: int, tokens: int, device: torch.device) -> Tensor:
    """Positions of a rank's tokens in the full sequence, int64 (tokens,): chunks `rank` and `2 ranks - 1 - rank` of 2 `ranks`."""
    half = tokens // 2
    chunk = torch.arange(half, device=device)
    return torch.cat((chunk + rank * half, chunk + (2 * ranks - 1 - rank) * half))


class _Ring(torch.autograd.Function):
    """Softmax attention over a ring. The backward pass rotates keys and values once more, together with their accumulated gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: RingPlan, scale: float | None) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=wide, device=q.device)
        logsumexp = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
        ranks, widths = plan.group.size(), (k.shape[3], v.shape[3])
        kv = torch.cat((k, v), dim=3)
        for step in range(ranks):
            next_kv = _RingExchange(kv, plan.group) if step < ranks - 1 else None
            if (block := plan.block(step)) is not None:
                rows = block.queries
                keys, values = kv[:, :, block.keys].split(widths, dim=3)
                partial = partial_attention.forward(q[:, :, rows], keys, values, block.mask, window=plan.window, scale=scale)
                out[:, :, rows], logsumexp[:, :, rows] = partial_attention.merge(out[:, :, rows], logsumexp[:, :, rows], *partial)
            if next_kv is not None:
                kv = next_kv.wait()
        out = out.to(v.dtype)
        ctx.plan, ctx.scale = plan, scale
        ctx.save_for_backward(q, k, v, out, logsumexp)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        plan: RingPlan = ctx.plan
        ranks, widths = plan.group.size(), (k.shape[3], v.shape[3])
        grad_q = torch.zeros_like(q, dtype=logsumexp.dtype)
        kv = torch.cat((k, v), dim=3)
        next_grad: _RingExchange | None = None
        for step in range(ranks):
            next_kv = _RingExchange(kv, plan.group) if step < ranks - 1 else None
            grad_kv = torch.zeros_like(kv, dtype=logsumexp.dtype)
            if (block := plan.block(step)) is not None:
                rows = block.queries
                keys, values = kv[:, :, block.keys].split(widths, dim=3)
                block_grad_q, *block_grad_kv = partial_attention.backward(
                    grad[:, :, rows],
                    q[:, :, rows],
                    keys,
                    values,
                    out[:, :, rows],
                    logsumexp[:, :, rows],
                    block.mask,
                    window=plan.window,
                    scale=ctx.scale,
                )
                grad_q[:, :, rows] += block_grad_q
                grad_kv[:, :, block.keys] = torch.cat(block_grad_kv, dim=3).to(logsumexp.dtype)
            # The gradients follow their keys one step behind; the last exchange returns them to the rank of the keys.
            if next_grad is not None:
                grad_kv += next_grad.wait()
            next_grad = _RingExchange(grad_kv, plan.group, tag=1)
            if next_kv is not None:
                kv = next_kv.wait()
        assert next_grad is not None
        grad_k, grad_v = next_grad.wait().split(widths, dim=3)
        return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), None, None


class _RingExchange:
    """An asynchronous send to the next rank and receive from the previous rank.

    Two exchanges may be in flight at once, of keys with values and of their gradients; separate tags keep them apart.
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

    def wait(self) -> Tensor:
        """Wait for the exchange and return the received tensor."""
        for work in self._work:
            work.wait()
        return self._received
