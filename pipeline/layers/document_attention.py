"""Attention within documents over a subset of the keys (ring attention), by flash attention for sequences of different lengths.

The kernel computes the segments of layers/document_segments.py. Short documents have none where queries and keys are the same tokens: each
block of SHORT queries attends to its own and the neighboring keys with the unfused formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.layers import document_segments, partial_attention
from pipeline.layers.attention_kernel import PartialKernel, facts_of, pad_values, partial_kernel
from pipeline.layers.mask import Mask

_ATEN = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, limits: Tensor, *, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute attention within documents over these keys; see forward (layers/partial_attention.py).

    Args:
        q, k, v, scale: as there.
        mask: documents, and key_documents if the keys are other tokens; `causal` if they are the same ones, in the order of the sequence.
        limits: own_segments or shared_segments of the documents.
    """
    kernel = partial_kernel(*facts_of(q, k, v, Mask(causal=mask.causal), None))
    if kernel == "unfused":
        return partial_attention.formula_forward(q, k, v, mask, scale=scale)
    out, lse = segments_forward(kernel, q, k, v, limits, causal=mask.causal, scale=scale)
    if mask.key_documents is not None:
        return out, lse
    short, short_lse = short_forward(q, k, v, mask, scale=scale)
    # A query has all of its keys in one of both.
    return torch.where(short_lse.unsqueeze(3) > -torch.inf, short, out), torch.maximum(lse, short_lse)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask,
    limits: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the contribution of these keys to the gradients; see backward (layers/partial_attention.py) and `forward`."""
    kernel = partial_kernel(*facts_of(q, k, v, Mask(causal=mask.causal), None))
    if kernel == "unfused":
        return partial_attention.formula_backward(grad, q, k, v, out, lse, mask, scale=scale)
    grads = segments_backward(kernel, grad, q, k, v, out, lse, limits, causal=mask.causal, scale=scale)
    if mask.key_documents is not None:
        return grads
    short = short_backward(grad, q, k, v, out, lse, mask, scale=scale)
    grad_q, grad_k, grad_v = (long + part for long, part in zip(grads, short, strict=True))
    return grad_q, grad_k, grad_v


def short_forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute attention within documents of at most SHORT tokens; arguments and result as in segments_forward."""
    blocks = _blocks(q, 1), _blocks(k, _pieces(mask)), _blocks(v, _pieces(mask))
    out, lse = partial_attention.formula_forward(*blocks, _short_mask(mask), scale=scale)
    return _joined(out, q.shape[2]), _joined(lse.unsqueeze(3), q.shape[2]).squeeze(3)


def short_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Mask, *, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the contribution of documents of at most SHORT tokens to the gradients; arguments and result as in backward."""
    pieces = _pieces(mask)
    grad_blocks, out_blocks, lse_blocks = _blocks(grad, 1), _blocks(out, 1), _blocks(lse.unsqueeze(3), 1).squeeze(3)
    blocks = _blocks(q, 1), _blocks(k, pieces), _blocks(v, pieces)
    grads = partial_attention.formula_backward(grad_blocks, *blocks, out_blocks, lse_blocks, _short_mask(mask), scale=scale)
    grad_q, grad_k, grad_v = (_joined(x, q.shape[2]) for x in grads)
    return grad_q, grad_k, grad_v


def segments_forward(
    kernel: PartialKernel, q: Tensor, k: Tensor, v: Tensor, limits: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention within segments; arguments and result as in forward, with zeros and -inf for queries without keys."""
    batch, heads, queries, _ = q.shape
    if kernel == "flash_cpu":
        out = v.new_zeros(*q.shape[:3], v.shape[3])
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
        for row, rows, keys in _each(limits, queries, k.shape[2]):
            part = q[row, :, rows], k[row, :, keys], v[row, :, keys]
            out[row, :, rows], lse[row, :, rows] = partial_attention.forward(*part, Mask(causal=causal), scale=scale)
        return out, lse
    flat = (_flat(x) for x in (q, k, pad_values(q, v)))
    options = (0.0, causal, False)
    flat_out, flat_lse = _ATEN._flash_attention_forward(*flat, limits[0], limits[1], queries, k.shape[2], *options, scale=scale)[:2]
    # Of a query without keys, FlashAttention 2 returns infinity.
    lse = flat_lse.masked_fill(flat_lse == torch.inf, -torch.inf).view(heads, batch, queries).transpose(0, 1)
    return _unflat(flat_out, batch)[..., : v.shape[3]], lse.contiguous()


def segments_backward(
    kernel: PartialKernel,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    limits: Tensor,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the contribution of the keys of segments to the gradients; arguments and result as in backward."""
    if kernel == "flash_cpu":
        grads = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for row, rows, keys in _each(limits, q.shape[2], k.shape[2]):
            part = grad[row, :, rows], q[row, :, rows], k[row, :, keys], v[row, :, keys], out[row, :, rows], lse[row, :, rows]
            summands = partial_attention.backward(*part, Mask(causal=causal), scale=scale)
            for whole, where, summand in zip(grads, (rows, keys, keys), summands, strict=True):
                whole[row, :, where] = summand
        return grads
    flat_grad, flat_q, flat_k, flat_v, flat_out = (_flat(x) for x in (pad_values(q, grad), q, k, pad_values(q, v), pad_values(q, out)))
    flat_lse = lse.transpose(0, 1).reshape(q.shape[1], -1)
    rng_state = torch.empty(0, dtype=torch.int64, device=q.device)  # RNG state of dropout, unused
    lengths = limits[0], limits[1], q.shape[2], k.shape[2]
    flat = _ATEN._flash_attention_backward(
        flat_grad, flat_q, flat_k, flat_v, flat_out, flat_lse, *lengths, 0.0, causal, rng_state, rng_state, scale=scale
    )
    grad_q, grad_k, grad_v = (_unflat(x, len(q)) for x in flat)
    return grad_q, grad_k, grad_v[..., : v.shape[3]]


def _each(limits: Tensor, queries: int, keys: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the row (of one), the queries and the keys of every segment that has both; reads the limits on the host."""
    for (start, stop), (key_start, key_stop) in zip(*(pairwise(side) for side in limits.tolist()), strict=True):
        if start < stop and key_start < key_stop:
            row = start // queries
            moved, key_moved = row * queries, row * keys
            yield slice(row, row + 1), slice(start - moved, stop - moved), slice(key_start - key_moved, key_stop - key_moved)


def _flat(x: Tensor) -> Tensor:
    """(batch, heads, tokens, width) -> (batch * tokens, heads, width), with a last stride of 1."""
    flat = x.transpose(1, 2).flatten(0, 1)
    return flat if flat.stride(2) == 1 else flat.contiguous()


def _unflat(x: Tensor, batch: int) -> Tensor:
    """Invert _flat."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


def _pieces(mask: Mask) -> int:
    """Blocks of keys of a block of queries: with their own one the one before, and if not causal the one after."""
    return 2 if mask.causal else 3


def _blocks(x: Tensor, pieces: int, value: float = 0) -> Tensor:
    """(batch, heads, tokens, width) -> (batch * blocks, heads, pieces * SHORT, width): every block with its neighbors, padded with `value`.

    Of two pieces, the first one is the block before; of three, the last one is the block after.
    """
    missing = -x.shape[2] % document_segments.SHORT
    before, after = (document_segments.SHORT if pieces > 1 else 0), (document_segments.SHORT if pieces > 2 else 0)
    padded = F.pad(x, (0, 0, before, missing + after), value=value)
    return padded.unfold(2, pieces * document_segments.SHORT, document_segments.SHORT).permute(0, 2, 1, 4, 3).flatten(0, 1)


def _joined(x: Tensor, tokens: int) -> Tensor:
    """(batch * blocks, heads, pieces * SHORT, width) -> (batch, heads, tokens, width): the sums of the pieces of each block."""
    count, pieces = -(-tokens // document_segments.SHORT), x.shape[2] // document_segments.SHORT
    parts = x.unflatten(0, (-1, count)).transpose(1, 2).unflatten(3, (pieces, document_segments.SHORT))
    # Piece i of block j belongs to block j + i - 1, or to j if it is the only one.
    total = parts[:, :, :, min(1, pieces - 1)]
    if pieces > 1:
        total = total + F.pad(parts[:, :, 1:, 0], (0, 0, 0, 0, 0, 1))
    if pieces > 2:
        total = total + F.pad(parts[:, :, :-1, 2], (0, 0, 0, 0, 1, 0))
    return total.flatten(2, 3)[:, :, :tokens]


def _short_mask(mask: Mask) -> Mask:
    """The mask of _blocks of queries over those of keys: within documents of at most SHORT tokens."""
    assert mask.documents is not None
    short = mask.documents.masked_fill(document_segments.document_lengths(mask.documents) > document_segments.SHORT, -1)[:, None, :, None]
    pieces = _pieces(mask)
    # Other documents than those of any key, and positions in the order of the sequence.
    queries, keys = _blocks(short.masked_fill(short == -1, -2), 1, -2), _blocks(short, pieces, -1)
    places = torch.arange(pieces * document_segments.SHORT, device=short.device)[None]
    return Mask(
        causal=mask.causal,
        documents=queries[:, 0, :, 0],
        key_documents=keys[:, 0, :, 0],
        positions=places[:, document_segments.SHORT : 2 * document_segments.SHORT],
        key_positions=places,
    )
