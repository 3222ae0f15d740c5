"""Consolidates a sharded checkpoint: joins the fragments of all ranks into full weights, and extracts fragments from full weights.

A fragment is a run of elements of a flattened piece; the piece is a slice of the full weight (parallel/pieces.py).
`consolidate_fragments` joins the fragments of a weight, `extract_fragment` is its inverse for one of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pipeline.parallel.pieces import Piece


def consolidate_fragments(shape: tuple[int, ...], fragments: Iterable[tuple[Piece, int, Tensor]]) -> tuple[Tensor, int]:
    """Join fragments into a full weight.

    Args:
        shape: of the full weight.
        fragments: (piece, first element in the flattened piece, flat values), without overlap.

    Returns:
        The full weight, fp32, and the number of elements written; elements that no fragment holds are undefined.
    """
    full = torch.empty(shape, dtype=torch.float32)
    written = 0
    for piece, start, values in fragments:
        insert_fragment(full, piece, start, values)
        written += values.numel()
    return full, written


def insert_fragment(full: Tensor, piece: Piece, start: int, values: Tensor) -> None:
    """Write a fragment into the full weight, in place.

    Args:
        full: the full weight.
        piece: the piece that contains the fragment.
        start: first element of the fragment in the flattened piece.
        values: the elements of the fragment, flat.
    """
    part = piece.narrow(full)
    if part.is_contiguous():
        part.view(-1)[start : start + values.numel()] = values
    else:
        flat = part.flatten()
        flat[start : start + values.numel()] = values
        part.copy_(flat.view_as(part))


def extract_fragment(full: Tensor, piece: Piece, start: int, count: int) -> Tensor:
    """Return elements `start : start + count` of a flattened piece of the full weight."""
    return piece.narrow(full).flatten()[start : start + count]
