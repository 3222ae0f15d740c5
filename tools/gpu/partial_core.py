"""Ring attention on one rank: attention over parts of the keys, merged, with the hand-written backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.layers import partial_attention
from pipeline.layers.mask import Mask

#: Keys of a part, and the mask of the queries over them.
Part = tuple[slice, Mask]


class PartialAttention(torch.autograd.Function):
    """Attention over parts of the keys; arguments as in Core (layers/attention.py), with the parts in place of the mask."""

    @staticmethod
    def forward(  # noqa: D102 - of torch
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part], window: int | None, scale: float | None
    ) -> Tensor:
        found = [partial_attention.forward(q, k[:, :, keys], v[:, :, keys], mask, window=window, scale=scale) for keys, mask in parts]
        total = found[0][1]
        out = found[0][0].to(total.dtype)
        for other in found[1:]:
            partial_attention.merge_(out, total, *other)
        ctx.save_for_backward(q, k, v, out, total)
        ctx.rest = parts, window, scale
        return out.to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: D102 - of torch
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
