"""Fragments: what a rank saves and loads of a weight, joined into full weights and extracted from them (words: parallel/pieces.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.checkpoint.save_plan import Held
from pipeline.layers.nf4 import NF4Weight
from pipeline.models.tensor_parallel_roles import SPLITS
from pipeline.parallel.pieces import Piece

#: Name of a dtype in safetensors.
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class Fragment:
    """The run of elements `start : start + n` of a flattened piece that this rank optimizes.

    Attributes:
        piece: slice of the full weight that contains the fragment.
        start: first element in the flattened piece.
        tensors: "weight" and both moments -> flat fp32 views of n elements, written in place on load; a weight in 4 bits is always full.
        replica: number of this rank among the ranks that hold the same elements, 0 for the primary copy.
        replicas: number of ranks that share the writing of these elements; a rank from this number on writes nothing.
        group: the mesh axes along which these ranks differ; the fragments of a rank with the same group are held by the same ranks.
    """

    piece: Piece
    start: int
    tensors: dict[str, Tensor | NF4Weight]
    replica: int = 0
    replicas: int = 1
    group: str = ""

    def held(self) -> Held:
        """What the plan of a save needs to know of the fragment."""
        return Held(
            name=self.piece.name,
            shape=self.piece.full_shape,
            box=self.piece.box,
            start=self.start,
            count=self.tensors["weight"].numel(),
            dtypes={kind: DTYPES[values.dtype] for kind, values in self.tensors.items()},
            sliced_dim=SPLITS[self.piece.role].get("tensor", 0),
            replicas=self.replicas,
            replica=self.replica,
            group=self.group,
        )


def insert_fragment(full: Tensor, piece: Piece, start: int, values: Tensor) -> None:
    """Write a fragment into the full weight, in place.

    Args:
        full: the full weight.
        piece: the piece that contains the fragment.
        start: first element of the fragment in the flattened piece.
        values: the elements of the fragment, flat.
    """
    narrowed = piece.narrow(full)
    if narrowed.is_contiguous():
        narrowed.view(-1)[start : start + values.numel()] = values
    else:
        flat = narrowed.flatten()
        flat[start : start + values.numel()] = values
        narrowed.copy_(flat.view_as(narrowed))


def extract_fragment(full: Tensor, piece: Piece, start: int, count: int) -> Tensor:
    """Return elements `start : start + count` of a flattened piece of the full weight."""
    return piece.narrow(full).flatten()[start : start + count]
