"""Attention within documents over a subset of the keys (ring attention), by flash attention for sequences of different lengths.

Documents are contiguous, so that a document has one range of queries and one of keys (a segment) in any two parts of a sequence. The
kernel takes the limits of all segments of a batch as cumulative lengths on the device. The host does not read them: the number of segments
and their greatest length are bounded by the shapes. The kernel's memory and time grow with this bound, so that documents of at most SHORT
tokens of one part have no segment: each block of SHORT queries attends to its own and the neighboring keys with the unfused formula.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.layers import partial_attention
from pipeline.layers.attention_kernel import PartialKernel, facts_of, pad_values, partial_kernel
from pipeline.layers.mask import Mask

#: Tokens of the longest document without a segment where queries and keys are the same tokens.
SHORT = 128

_ATEN = torch.ops.aten


def own_segments(documents: Tensor) -> Tensor:
    """Return the segments of documents of more than SHORT tokens, where queries and keys are the same tokens.

    Args:
        documents: int (batch, tokens), ascending in each row.

    Returns:
        Their limits, as `segments`.
    """
    batch, tokens = documents.shape
    count = _most_long(tokens)
    first, last = torch.ones_like(documents, dtype=torch.bool), torch.ones_like(documents, dtype=torch.bool)
    first[:, 1:] = last[:, :-1] = documents[:, 1:] != documents[:, :-1]
    lengths = _lengths(documents)
    places = torch.arange(tokens, device=documents.device).expand(batch, -1)
    limits = []
    for ends, offset in ((first, 0), (last, 1)):
        long = ends & (lengths > SHORT)
        # The column after the last one takes what is not the limit of a long document.
        column = torch.where(long, long.cumsum(1) - 1, count)
        found = torch.full((batch, count + 1), tokens, device=documents.device).scatter_(1, column, places + offset)
        limits.append(found[:, :count])
    return segments((limits[0], limits[1]), (limits[0], limits[1]), tokens, tokens)


def workspace(batch: int, tokens: int, heads: int, width: int) -> int:
    """Return the bytes that the CUDA kernel allocates in the backward pass of own_segments: 128 rows of fp32 sums for every segment."""
    return 4 * heads * width * (batch * tokens + 128 * (own_limits(batch, tokens) - 1))


def own_limits(batch: int, tokens: int) -> int:
    """Return the number of limits of own_segments."""
    return batch * (3 * _most_long(tokens) + 2) + 1


def _most_long(tokens: int) -> int:
    """Return the greatest number of documents of more than SHORT tokens in a row."""
    return tokens // (SHORT + 1)


def shared_segments(query_documents: Tensor, key_documents: Tensor, *, causal: bool) -> Tensor:
    """Return the segments of the documents that have queries and keys, where these are different parts of a sequence.

    All keys precede all queries if `causal`; then only the first query's document can have both. Else one part is inside of the other one,
    and only the documents of its first and its last token can have both.

    Args:
        query_documents: int (batch, queries), ascending in each row.
        key_documents: int (batch, keys), ascending in each row.
        causal: see above.

    Returns:
        Their limits, as `segments`.
    """
    query_documents, key_documents = query_documents.contiguous(), key_documents.contiguous()
    candidates = query_documents[:, :1]
    if not causal:
        # Those of the inner part are among these four, in ascending order; a repeated one must not have a second segment.
        ends = (query_documents[:, :1], query_documents[:, -1:], key_documents[:, :1], key_documents[:, -1:])
        candidates = torch.cat(ends, dim=1).sort(dim=1).values
        repeated = candidates[:, 1:] == candidates[:, :-1]
        candidates[:, 1:].masked_fill_(repeated, torch.iinfo(candidates.dtype).max)
        candidates = candidates.sort(dim=1).values
    candidates = candidates.contiguous()
    queries, keys = (
        (torch.searchsorted(documents, candidates), torch.searchsorted(documents, candidates, right=True))
        for documents in (query_documents, key_documents)
    )
    return segments(queries, keys, query_documents.shape[1], key_documents.shape[1])


def segments(queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor], query_count: int, key_count: int) -> Tensor:
    """Return the cumulative lengths of segments that have all tokens, those outside of the given ranges without keys or without queries.

    Args:
        queries: first and last limit of ranges of queries in each row, int (batch, ranges), ascending and disjoint.
        keys: of the keys that they attend to.
        query_count, key_count: tokens of a row.

    Returns:
        int32 (2, batch * (3 * ranges + 2) + 1): of queries and of keys, of the rows one after another.
    """
    rows = []
    # Before each range its queries, then the keys before it; at the end of a row the other queries, then the other keys.
    for (start, stop), count, with_keys in ((queries, query_count, False), (keys, key_count, True)):
        before = F.pad(stop, (1, 0))
        end = torch.full_like(before[:, :1], count)
        steps = torch.stack((before[:, :-1] if with_keys else start, start, stop), dim=2).flatten(1)
        row = torch.cat((steps, before[:, -1:] if with_keys else end, end), dim=1)
        rows.append(F.pad((row + torch.arange(len(row), device=row.device)[:, None] * count).flatten(), (1, 0)))
    return torch.stack(rows).to(torch.int32)


def _lengths(documents: Tensor) -> Tensor:
    """Return the number of tokens of the document of each token, int64 (batch, tokens); documents are ascending in each row."""
    documents = documents.contiguous()
    return torch.searchsorted(documents, documents, right=True) - torch.searchsorted(documents, documents)


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
    found = segments_backward(kernel, grad, q, k, v, out, lse, limits, causal=mask.causal, scale=scale)
    if mask.key_documents is not None:
        return found
    short = short_backward(grad, q, k, v, out, lse, mask, scale=scale)
    grad_q, grad_k, grad_v = (long + part for long, part in zip(found, short, strict=True))
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
    grad_q, grad_k, grad_v = (_joined(each, q.shape[2]) for each in grads)
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
            found = partial_attention.backward(*part, Mask(causal=causal), scale=scale)
            for whole, where, summand in zip(grads, (rows, keys, keys), found, strict=True):
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
    for (start, stop), (key_start, key_stop) in zip(*(pairwise(each) for each in limits.tolist()), strict=True):
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
    missing = -x.shape[2] % SHORT
    before, after = (SHORT if pieces > 1 else 0), (SHORT if pieces > 2 else 0)
    padded = F.pad(x, (0, 0, before, missing + after), value=value)
    return padded.unfold(2, pieces * SHORT, SHORT).permute(0, 2, 1, 4, 3).flatten(0, 1)


def _joined(x: Tensor, tokens: int) -> Tensor:
    """(batch * blocks, heads, pieces * SHORT, width) -> (batch, heads, tokens, width): the sums of the pieces of each block."""
    count, pieces = -(-tokens // SHORT), x.shape[2] // SHORT
    parts = x.unflatten(0, (-1, count)).transpose(1, 2).unflatten(3, (pieces, SHORT))
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
    short = mask.documents.masked_fill(_lengths(mask.documents) > SHORT, -1)[:, None, :, None]
    pieces = _pieces(mask)
    # Other documents than those of any key, and positions in the order of the sequence.
    queries, keys = _blocks(short.masked_fill(short == -1, -2), 1, -2), _blocks(short, pieces, -1)
    places = torch.arange(pieces * SHORT, device=short.device)[None]
    return Mask(
        causal=mask.causal,
        documents=queries[:, 0, :, 0],
        key_documents=keys[:, 0, :, 0],
        positions=places[:, SHORT : 2 * SHORT],
        key_positions=places,
    )
