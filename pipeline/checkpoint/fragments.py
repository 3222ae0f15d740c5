"""Fragments: what a rank holds, saves and loads of a weight, joined into full weights and extracted from them (words: parallel/pieces.py).

Which elements of its fragments a rank writes is arithmetic of its own fragments, without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.checkpoint.parts import ITEM_SIZE, Box, Part, block_bytes
from pipeline.layers.nf4 import NF4Weight
from pipeline.models.tensor_parallel_roles import SPLITS
from pipeline.parallel.pieces import Piece

#: Name of a dtype in safetensors.
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True)
class Held:
    """What a rank holds of a weight, and which ranks hold the same.

    Attributes:
        shape: of the full weight.
        box: the piece of the rank.
        start: first element in the flattened box.
        dtypes: kind -> name of its dtype in safetensors.
        sliced_dim: the largest dim that tensor parallelism slices in any layout, 0 also for none (parts.block_bytes).
        replicas: number of ranks that hold the same elements.
        replica: number of this rank among them.
        group: distinguishes the sets of ranks: of two fragments of a rank with the same group, all ranks that hold one hold the other.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    count: int
    dtypes: dict[str, str]
    sliced_dim: int = 0
    replicas: int = 1
    replica: int = 0
    group: str = ""


@dataclass(frozen=True)
class Share:
    """A part that this rank writes.

    Attributes:
        fragment: number of the fragment.
        first: first element, counted from the start of the fragment.
    """

    fragment: int
    first: int
    part: Part


def plan(held: Sequence[Held]) -> list[Share]:
    """Return the parts that this rank writes of its fragments, one of each weight, in their order.

    The fragments that the same ranks hold are lined up by name, and each of these ranks writes an equal share of their bytes,
    to the element.
    """
    groups: dict[str, list[int]] = {}
    for number in sorted(range(len(held)), key=lambda number: held[number].name):  # pipeline stages have them in another order
        groups.setdefault(held[number].group, []).append(number)
    return sorted((share for members in groups.values() for share in _shares(held, members)), key=lambda share: share.fragment)


def _shares(held: Sequence[Held], members: list[int]) -> list[Share]:
    """The share of this rank of the fragments that the same ranks hold."""
    replica, replicas = held[members[0]].replica, held[members[0]].replicas
    total = sum(_element_bytes(held[number]) * held[number].count for number in members)
    begin, end = total * replica // replicas, total * (replica + 1) // replicas
    shares, offset = [], 0
    for number in members:
        fragment, size = held[number], _element_bytes(held[number])
        assert (fragment.replica, fragment.replicas) == (replica, replicas), f"{fragment.name}: other ranks hold it than its group"
        first, last = (min(max((border - offset) // size, 0), fragment.count) for border in (begin, end))
        if first < last:
            shares.append(Share(number, first, _part(fragment, first, last)))
        offset += size * fragment.count
    return shares


def _element_bytes(fragment: Held) -> int:
    """Bytes of an element of all kinds."""
    return sum(ITEM_SIZE[dtype] for dtype in fragment.dtypes.values())


def _part(fragment: Held, first: int, last: int) -> Part:
    block = block_bytes(fragment.shape, fragment.sliced_dim, ITEM_SIZE[fragment.dtypes["weight"]])
    return Part(fragment.name, fragment.shape, fragment.box, fragment.start + first, last - first, block, fragment.dtypes)


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
    """Write the elements of a fragment, flat, from `start` of a flattened piece on into the full weight, in place."""
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
