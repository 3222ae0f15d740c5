"""Which tokens the ranks of a ring hold, which of them attend to each other, and the segments of their documents.

Each of n ranks holds two of 2n chunks of a sequence, r and 2n-1-r, an early and a late one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.layers.document_segments import own_limits, own_segments, shared_segments


def attended(rank: int, source: int, tokens: int, *, causal: bool, window: int | None) -> tuple[slice, slice] | None:
    """Return which of its queries a rank attends with, and to which keys of rank `source`; None if to none.

    Args:
        rank, source: of the ring.
        tokens: of a rank.
        causal: a query does not attend to later positions.
        window: as in Mask.visible.
    """
    half, full = tokens // 2, slice(0, tokens)
    if not causal:
        return full, full
    if window is not None and (abs(rank - source) - 1) * half + 1 >= window:
        return None  # even the nearest key is outside the window
    return full if source <= rank else slice(half, tokens), full if source >= rank else slice(0, half)


def token_positions(rank: int, ranks: int, tokens: int, device: torch.device) -> Tensor:
    """Positions of a rank's tokens in the full sequence, int64 (tokens,): chunks `rank` and `2 ranks - 1 - rank` of 2 `ranks`."""
    half = tokens // 2
    chunk = torch.arange(half, device=device)
    return torch.cat((chunk + rank * half, chunk + (2 * ranks - 1 - rank) * half))


def ascending(documents: Tensor) -> Tensor:
    """Number the documents in the order of the sequence: padding (-1) follows all others.

    Args:
        documents: int32 (ranks, batch, tokens), of every rank's tokens; those of a document are contiguous in the sequence.
    """
    early, late = documents.unflatten(2, (2, -1)).unbind(2)
    chunks = torch.cat((early, late.flip(0)))
    whole = chunks.transpose(0, 1).flatten(1)
    numbers = torch.zeros_like(whole)
    numbers[:, 1:] = (whole[:, 1:] != whole[:, :-1]).cumsum(1)
    early, late = numbers.unflatten(1, (len(chunks), -1)).transpose(0, 1).chunk(2)
    return torch.cat((early, late.flip(0)), dim=2)


def segment_limits(documents: Tensor, rank: int, *, causal: bool) -> Tensor:
    """Return the segments (layers/document_segments.py) of all steps of the ring on a rank, one after another.

    Args:
        documents: int32 (ranks, batch, tokens), ascending.
        rank: of the ring.
        causal: as in `attended`.
    """
    ranks, _, tokens = documents.shape
    limits = [own_segments(documents[rank])]
    for step in range(1, ranks):
        source = (rank - step) % ranks
        blocks = attended(rank, source, tokens, causal=causal, window=None)
        assert blocks is not None, "without a window, a rank attends to keys of every rank"
        limits.append(shared_segments(documents[rank][:, blocks[0]], documents[source][:, blocks[1]], causal=causal))
    return torch.cat(limits, dim=1)


def limits_of_step(limits: Tensor, step: int, documents: Tensor) -> Tensor:
    """Return the segments of one step from those of all steps; documents as in segment_limits."""
    ranks, batch, tokens = documents.shape
    count = own_limits(batch, tokens)
    if step == 0:
        return limits[:, :count]
    shared = (limits.shape[1] - count) // (ranks - 1)
    return limits[:, count + (step - 1) * shared : count + step * shared]
