"""The segments of documents for flash attention over sequences of different lengths, as cumulative lengths on the device.

Documents are contiguous, so that a document has one range of queries and one of keys (a segment) in any two parts of a sequence. The host
does not read the lengths: the number of segments and their greatest length are bounded by the shapes. The kernel's memory and time grow
with this bound, so that documents of at most SHORT tokens of one part have no segment (layers/document_attention.py).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

#: Tokens of the longest document without a segment where queries and keys are the same tokens.
SHORT = 128


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
    lengths = document_lengths(documents)
    places = torch.arange(tokens, device=documents.device).expand(batch, -1)
    limits = []
    for ends, offset in ((first, 0), (last, 1)):
        long = ends & (lengths > SHORT)
        # The column after the last one takes what is not the limit of a long document.
        column = torch.where(long, long.cumsum(1) - 1, count)
        padded = torch.full((batch, count + 1), tokens, device=documents.device).scatter_(1, column, places + offset)
        limits.append(padded[:, :count])
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


def document_lengths(documents: Tensor) -> Tensor:
    """Return the number of tokens of the document of each token, int64 (batch, tokens); documents are ascending in each row."""
    documents = documents.contiguous()
    return torch.searchsorted(documents, documents, right=True) - torch.searchsorted(documents, documents)
