"""Full weights from the fragments that ranks hold."""

from __future__ import annotations

from torch import Tensor

from pipeline.parallel.pieces import Piece


def paste(full: Tensor, piece: Piece, start: int, values: Tensor) -> None:
    """Write a run of elements of a flattened piece into the full tensor.

    Args:
        full: the whole weight, written in place.
        piece: which part of it the run belongs to.
        start: the run's first element in the flattened piece.
        values: flat; its elements.
    """
    part = piece.of(full)
    if part.is_contiguous():
        part.view(-1)[start : start + values.numel()] = values
    else:
        flat = part.flatten()
        flat[start : start + values.numel()] = values
        part.copy_(flat.view_as(part))


def extract(full: Tensor, piece: Piece, start: int, count: int) -> Tensor:
    """The run of elements `start : start + count` of a flattened piece, cut from the full tensor."""
    return piece.of(full).flatten()[start : start + count]
