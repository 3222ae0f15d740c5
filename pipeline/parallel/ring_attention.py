"""Ring attention (Liu et al. 2023, https://arxiv.org/abs/2310.01889): keys and values rotate around the ring, queries stay local.

Each of n ranks holds two of 2n chunks of a sequence, r and 2n-1-r (parallel/context_parallel.py). Under a causal mask, every step of the
ring then has the same cost on every rank: first the local keys under the mask, then either all local queries with the first half of the
received keys (if they belong to a lower rank) or the second half of the local queries with all received keys (a higher rank).

Forward and backward pass are custom operators: torch.compile calls them without looking inside, and selective activation checkpointing
saves their results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from pipeline.layers import document_attention, partial_attention
from pipeline.layers.mask import Mask
from pipeline.parallel import collectives
from pipeline.parallel.ring_layout import ascending, attended, limits_of_step, segment_limits, token_positions


@dataclass(frozen=True)
class RingCore:
    """An attention core over sequences that are sharded over a group; inputs and output are the local tokens."""

    group: ProcessGroup

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See Core (layers/attention.py); the mask has the documents of the local tokens and the slopes of the local heads."""
        assert mask.bias is None, "ring attention does not shard a bias per query and key"
        assert mask.key_documents is None, "ring attention supports self-attention only"
        assert mask.key_positions is None, "ring attention supports self-attention only"
        if window is not None and window >= q.shape[2] * self.group.size():
            window = None  # of a model whose window no sequence exceeds: without a rule, a fused kernel applies
        documents, limits = self._documents(mask, window)
        out, _ = ring_attention(
            q,
            k,
            v,
            documents,
            limits,
            mask.slopes,
            mask.prefix,
            sinks,
            group=self.group.group_name,
            causal=mask.causal,
            window=window,
            scale=scale,
            softcap=mask.softcap,
        )
        return out

    def prepare(
        self,
        mask: Mask,
        window: int | None,
        shape: tuple[int, int, int] | None,
        device: torch.device,  # noqa: ARG002 - the interface of cores
        *,
        sinks: bool = False,  # noqa: ARG002 - as above
    ) -> None:
        """Gather the documents of all tokens and find their segments; see prepare (layers/attention_kernel.py)."""
        if shape is not None and window is not None and window >= shape[1] * self.group.size():
            window = None
        self._documents(mask, window)

    def _documents(self, mask: Mask, window: int | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the documents of all tokens, (ranks, batch, tokens), and their segments if no other rule applies; None for none."""
        local = mask.documents
        if local is None:
            return None, None
        gathered: Tensor = mask.cached("documents of the ring", lambda: torch.stack(collectives.all_gather(local, self.group)))
        if mask.slopes is not None or mask.prefix is not None or mask.softcap is not None or window is not None:
            return gathered, None
        documents: Tensor = mask.cached("ascending documents of the ring", lambda: ascending(gathered))
        find = partial(segment_limits, documents, self.group.rank(), causal=mask.causal)
        return documents, mask.cached("segments of the ring", find)


@dataclass(frozen=True)
class AttentionBlock:
    """The attention that a rank computes in one step of the ring: slices of its queries and of the received keys, and their mask.

    The limits are those of the segments of documents (layers/document_segments.py), if the mask has no other rule.
    """

    queries: slice
    keys: slice
    mask: Mask
    limits: Tensor | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None, scale: float | None) -> tuple[Tensor, Tensor]:
        """Compute `forward` (layers/partial_attention.py) of these slices."""
        if self.limits is not None:
            return document_attention.forward(q, k, v, self.mask, self.limits, scale=scale)
        return partial_attention.forward(q, k, v, self.mask, window=window, scale=scale)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, window: int | None, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute `backward` (layers/partial_attention.py) of these slices."""
        if self.limits is not None:
            return document_attention.backward(grad, q, k, v, out, lse, self.mask, self.limits, scale=scale)
        return partial_attention.backward(grad, q, k, v, out, lse, self.mask, window=window, scale=scale)


@dataclass(frozen=True)
class RingPlan:
    """The attention blocks that this rank computes, one for each source rank of keys and values.

    Attributes:
        group: the context-parallel group.
        tokens: local sequence length.
        device: device of the tokens.
        mask: the mask of the local tokens.
        documents: (ranks, batch, tokens), the documents of every rank's tokens; None without a document mask.
        limits: as in segment_limits (ring_layout.py), if no rule applies besides documents and `causal`; the documents are then ascending.
        window: as in Mask.visible.
    """

    group: ProcessGroup
    tokens: int
    device: torch.device
    mask: Mask
    documents: Tensor | None
    limits: Tensor | None
    window: int | None

    def source(self, step: int) -> int:
        """The rank whose keys and values this rank holds at a step."""
        return (self.group.rank() - step) % self.group.size()

    def block(self, step: int) -> AttentionBlock | None:
        """The attention block of a step, None when no query attends to any of its keys."""
        source, causal = self.source(step), self.mask.causal and self.mask.prefix is None
        ranges = attended(self.group.rank(), source, self.tokens, causal=causal, window=self.window)
        if ranges is None:
            return None
        limits = None
        if self.limits is not None and self.documents is not None:
            limits = limits_of_step(self.limits, step, self.documents)
        return AttentionBlock(*ranges, self._block_mask(source, *ranges), limits)

    def _block_mask(self, source: int, queries: slice, keys: slice) -> Mask:
        """The mask between a slice of the local queries and a slice of the keys of rank `source`."""
        mask = self.mask
        ranks, rank = self.group.size(), self.group.rank()
        key_documents = None if self.documents is None else self.documents[source][:, keys]
        query_documents = None if mask.documents is None else mask.documents[:, queries]
        if mask.slopes is None and self.window is None and mask.prefix is None:
            # A rank's tokens are in the order of the sequence, and the keys of another one are before all of its queries.
            if source == rank:
                return mask.replace(documents=query_documents)
            return mask.replace(causal=False, documents=query_documents, key_documents=key_documents)
        return mask.replace(
            documents=query_documents,
            key_documents=key_documents,
            positions=token_positions(rank, ranks, self.tokens, self.device)[None, queries],
            key_positions=token_positions(source, ranks, self.tokens, self.device)[None, keys],
        )


def _plan(
    q: Tensor,
    documents: Tensor | None,
    limits: Tensor | None,
    slopes: Tensor | None,
    prefix: Tensor | None,
    group: str,
    causal: bool,
    window: int | None,
    softcap: float | None,
) -> RingPlan:
    """Return the plan of this rank from the arguments of the operators."""
    ranks = _resolve_process_group(group)  # type: ignore[arg-type] # a NewType of str
    local = None if documents is None else documents[ranks.rank()]
    mask = Mask(causal=causal, documents=local, slopes=slopes, prefix=prefix, softcap=softcap)
    return RingPlan(ranks, q.shape[2], q.device, mask, documents, limits, window)


def _zeros(q: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Return zeros (batch, heads, queries, width), contiguous as (batch, queries, heads, width), the layout of the flash kernels."""
    return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], width, dtype=dtype).transpose(1, 2)


@torch.library.custom_op("pipeline::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    limits: Tensor | None,
    slopes: Tensor | None,
    prefix: Tensor | None,
    sinks: Tensor | None,
    *,
    group: str,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax attention over a ring.

    Args:
        q, k, v: the local tokens, as in Core (layers/attention.py).
        documents, limits: as in RingPlan.
        slopes, prefix, causal, softcap: as in Mask.
        group: name of the context-parallel group.
        window: as in Mask.visible.
        scale, sinks: as in Core.

    Returns:
        The output (batch, heads, queries, value_dim), and log sum exp of the scores (batch, heads, queries), at least fp32; both with the
        sinks.
    """
    plan = _plan(q, documents, limits, slopes, prefix, group, causal, window, softcap)
    wide = torch.promote_types(q.dtype, torch.float32)
    out = _zeros(q, v.shape[3], wide)
    logsumexp = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
    ranks, widths = plan.group.size(), (k.shape[3], v.shape[3])
    kv = torch.cat((k, v), dim=3)
    for step in range(ranks):
        next_kv = _RingExchange(kv, plan.group) if step < ranks - 1 else None
        if (block := plan.block(step)) is not None:
            rows = block.queries
            keys, values = kv[:, :, block.keys].split(widths, dim=3)
            result = block.forward(q[:, :, rows], keys, values, window=window, scale=scale)
            partial_attention.merge_(out[:, :, rows], logsumexp[:, :, rows], *result)
        if next_kv is not None:
            kv = next_kv.wait()
    if sinks is not None:
        out, logsumexp = partial_attention.add_sinks(out, logsumexp, sinks)
    return out.to(v.dtype), logsumexp


@torch.library.custom_op("pipeline::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    documents: Tensor | None,
    limits: Tensor | None,
    slopes: Tensor | None,
    prefix: Tensor | None,
    *,
    group: str,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v: keys and values rotate once more, together with their accumulated gradients."""
    plan = _plan(q, documents, limits, slopes, prefix, group, causal, window, softcap)
    ranks, widths = plan.group.size(), (k.shape[3], v.shape[3])
    grad_q = _zeros(q, q.shape[3], logsumexp.dtype)
    kv = torch.cat((k, v), dim=3)
    next_grad: _RingExchange | None = None
    for step in range(ranks):
        next_kv = _RingExchange(kv, plan.group) if step < ranks - 1 else None
        grad_kv = torch.zeros_like(kv, dtype=logsumexp.dtype)
        if (block := plan.block(step)) is not None:
            rows = block.queries
            keys, values = kv[:, :, block.keys].split(widths, dim=3)
            block_grad_q, *block_grad_kv = block.backward(
                grad[:, :, rows],
                q[:, :, rows],
                keys,
                values,
                out[:, :, rows],
                logsumexp[:, :, rows],
                window=window,
                scale=scale,
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
    # Copies, since outputs of an operator share no memory.
    gradients = (grad.to(k.dtype, copy=True, memory_format=torch.contiguous_format) for grad in (grad_k, grad_v))
    return grad_q.to(q.dtype), *gradients


@ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *masks: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - the operator's signature
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return _zeros(q, v.shape[3], v.dtype), lse


@ring_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *saved: Tensor | None, **options: Any) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ARG001 - as above
    return _zeros(q, q.shape[3], q.dtype), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *masks = inputs
    ctx.save_for_backward(q, k, v, *output, *masks)
    ctx.options = keyword_only_inputs


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *saved, sinks = ctx.saved_tensors
    grad_sinks = None if sinks is None else partial_attention.sinks_gradient(grad, saved[3], saved[4], sinks)
    return (*ring_attention_backward(grad, *saved, **ctx.options), None, None, None, None, grad_sinks)


ring_attention.register_autograd(_backward, setup_context=_setup_context)


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
