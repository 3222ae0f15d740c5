"""The part of a weight and of its optimizer state that one rank saves and loads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pipeline.layers.nf4 import NF4Weight
from pipeline.parallel.pieces import Piece


@dataclass(frozen=True)
class Fragment:
    """The run of elements `start : start + n` of a flattened piece that this rank optimizes.

    Attributes:
        piece: slice of the full weight that contains the fragment.
        start: first element in the flattened piece.
        tensors: "weight" and both moments -> flat fp32 views of n elements, written in place on load; a weight in 4 bits is always full.
        owned: whether this rank saves the fragment; if not, another rank holds the same elements and saves them.
    """

    piece: Piece
    start: int
    tensors: dict[str, Tensor | NF4Weight]
    owned: bool
