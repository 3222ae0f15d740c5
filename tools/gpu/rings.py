"""Ring attention within documents on one rank: the steps of all ranks of a ring, one after another, with the hand-written backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pipeline.layers import document_attention, partial_attention
from pipeline.layers.mask import Mask
from pipeline.parallel.ring_layout import ascending, attended, limits_of_step, segment_limits, token_positions

#: Keys of a part, and the mask of the queries over them.
Part = tuple[slice, Mask]


class PartialAttention(torch.autograd.Function):
    """Attention over parts of the keys; arguments as in Core (layers/attention.py), with the parts in place of the mask."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part], window: int | None, scale: float | None) -> Tensor:
        found = [partial_attention.forward(q, k[:, :, keys], v[:, :, keys], mask, window=window, scale=scale) for keys, mask in parts]
        out, total = found[0][0].to(found[0][1].dtype, copy=True), found[0][1].clone()
        for other in found[1:]:
            partial_attention.merge_(out, total, *other)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.rest = parts, window, scale
        return out.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, total = ctx.saved_tensors
        parts, window, scale = ctx.rest
        grads = [torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in (q, k, v)]
        for keys, mask in parts:
            where = slice(None), slice(keys.start, keys.stop), slice(keys.start, keys.stop)
            found = partial_attention.backward(
                grad, q, k[:, :, keys], v[:, :, keys], out.to(v.dtype), total, mask, window=window, scale=scale
            )
            for whole, rows, part in zip(grads, where, found, strict=True):
                whole[:, :, rows] += part
        return *(whole.to(each.dtype) for whole, each in zip(grads, (q, k, v), strict=True)), None, None, None


def ring_core(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Causal attention of queries that are the last ones of the keys, over the keys before them and over their own, as in two hops."""
    before = k.shape[2] - q.shape[2]
    parts = [(slice(0, before), Mask(causal=False)), (slice(before, k.shape[2]), Mask())]
    result: Tensor = PartialAttention.apply(q, k, v, parts, None, scale)
    return result


class Step(NamedTuple):
    """A step of the ring on one rank: positions of its queries and keys in the sequence, their mask, and the limits of the segments."""

    queries: Tensor
    keys: Tensor
    mask: Mask
    limits: Tensor


def steps(documents: Tensor, ranks: int, rank: int, *, causal: bool) -> Iterator[Step]:
    """Yield the steps of a rank.

    Args:
        documents: int32 (batch, tokens), of the whole sequence.
        ranks: of the ring; twice as many divide the tokens.
        rank: one of them.
        causal: a query does not attend to later positions.
    """
    tokens = documents.shape[1] // ranks
    places = [token_positions(each, ranks, tokens, documents.device) for each in range(ranks)]
    shards = ascending(torch.stack([documents[:, rows] for rows in places]))
    limits = segment_limits(shards, rank, causal=causal)
    for step in range(ranks):
        source = (rank - step) % ranks
        found = attended(rank, source, tokens, causal=causal, window=None)
        assert found is not None
        queries, keys = found
        mask = Mask(causal=causal and step == 0, documents=shards[rank][:, queries])
        if step:
            mask = mask.replace(key_documents=shards[source][:, keys])
        yield Step(places[rank][queries], places[source][keys], mask, limits_of_step(limits, step, shards))


class DocumentRing(torch.autograd.Function):
    """Attention within documents; q, k and v as in Core (layers/attention.py), the other arguments as in `steps`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, documents: Tensor, ranks: int, causal: bool, scale: float | None) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_zeros(*q.shape[:3], v.shape[3], dtype=wide), q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        every = [step for rank in range(ranks) for step in steps(documents, ranks, rank, causal=causal)]
        for rows, keys, mask, limits in every:
            found = document_attention.forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], mask, limits, scale=scale)
            merged = out[:, :, rows], lse[:, :, rows]
            partial_attention.merge_(*merged, *found)
            out[:, :, rows], lse[:, :, rows] = merged
        result = out.to(v.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.rest = every, scale
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        every, scale = ctx.rest
        grads = [torch.zeros_like(each, dtype=lse.dtype) for each in (q, k, v)]
        for rows, keys, mask, limits in every:
            queries = grad[:, :, rows], q[:, :, rows]
            rest = k[:, :, keys], v[:, :, keys], out[:, :, rows], lse[:, :, rows]
            found = document_attention.backward(*queries, *rest, mask, limits, scale=scale)
            for whole, where, part in zip(grads, (rows, keys, keys), found, strict=True):
                whole[:, :, where] += part
        return *(whole.to(each.dtype) for whole, each in zip(grads, (q, k, v), strict=True)), None, None, None, None
