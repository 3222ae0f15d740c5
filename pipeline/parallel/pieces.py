"""Pieces: the part of each full weight that a rank holds, computed from the tensor-parallel table.

The words for parts of a weight, in all packages:

- A *full weight* is the tensor of the model on one rank without parallelism.
- A *piece* is what a rank's model holds of it under tensor and expert parallelism: the full weight, restricted by a *slice* along a dim for
  each of these axes.
- A *bucket* is a flat buffer of the pieces of several weights, which one collective reduces or gathers. Under ZeRO it is divided into one
  equal *partition* per data-parallel rank (training/buckets.py).
- A *fragment* is the run of elements of a flattened piece that lies in a rank's partition: what the rank optimizes, saves and loads
  (checkpoint/fragments.py). Without ZeRO it is the whole piece.

To *shard* a weight is to divide it into pieces; a *shard* is a file, of data or of a Hugging Face model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from pipeline.models.tensor_parallel_roles import FOLDED, SPLITS

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Slice:
    """The slice `start:stop` along `dim`, sharded over a mesh axis."""

    axis: str
    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """A rank's part of a full weight: the full weight, restricted by its slices.

    Attributes:
        name: the weight's name in the full model; a tied weight has its first name.
        full_shape: the shape of the full weight.
        slices: at most one per mesh axis. Of two along the same dim, the second one lies within the first.
        role: its role in the tensor-parallel table.
        shared: "tied_embedding" if the last stage holds the weight too, "pipeline" if all stages hold it, else empty.
        copy: whether the primary copy is on another rank of the pipeline.
        rate: learning rate of the weight as a factor of optimizer.lr.
    """

    name: str
    full_shape: tuple[int, ...]
    slices: tuple[Slice, ...] = ()
    role: str = "replicate"
    shared: str = ""
    copy: bool = False
    rate: float = 1.0

    def is_sliced_along(self, axis: str) -> bool:
        """Whether the weight is sharded over a mesh axis."""
        return any(s.axis == axis for s in self.slices)

    def start(self, dim: int) -> int:
        """Offset of the piece in the full weight along a dim."""
        return next((s.start for s in reversed(self.slices) if s.dim == dim), 0)

    @property
    def box(self) -> tuple[tuple[int, int], ...]:
        """First and last + 1 index of the piece along each dim of the full weight."""
        return tuple((self.start(dim), self.start(dim) + size) for dim, size in enumerate(self.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the piece."""
        sizes = list(self.full_shape)
        for s in self.slices:
            sizes[s.dim] = s.stop - s.start
        return tuple(sizes)

    @property
    def elements(self) -> int:
        """Number of elements of the piece."""
        return prod(self.shape)

    def narrow(self, full: Tensor) -> Tensor:
        """Return the piece of a full weight, as a view."""
        assert tuple(full.shape) == self.full_shape, f"{self.name}: {tuple(full.shape)} is not {self.full_shape}"
        for dim, (start, stop) in enumerate(self.box):
            full = full.narrow(dim, start, stop - start)
        return full


def slice_weight(name: str, shape: tuple[int, ...], role: str, axes: Mapping[str, tuple[int, int]], *, folded: bool = False) -> Piece:
    """Return the piece of a weight that one rank holds.

    Args:
        name: the weight's name in the full model.
        shape: its full shape, (output, input) for a matrix, (experts, output, input) for stacked experts.
        role: its role in the tensor-parallel table.
        axes: mesh axis -> (ranks, this rank's index), for "tensor" and "expert".
        folded: tensor ranks hold whole experts of those of their expert rank, instead of slices of all of them.
    """
    slices: list[Slice] = []
    splits = SPLITS[role]
    for axis, dim in (FOLDED if folded and "expert" in splits else splits).items():
        ranks, rank = axes[axis]
        if ranks == 1:
            continue
        first, last = next(((s.start, s.stop) for s in slices if s.dim == dim), (0, shape[dim]))
        size = last - first
        assert role == "vocab" or size % ranks == 0, f"{name}: {size} does not divide into {ranks} pieces"
        width = -(-size // ranks)  # the last pieces of a vocabulary may be shorter
        slices.append(Slice(axis, dim, first + min(rank * width, size), first + min((rank + 1) * width, size)))
    return Piece(name, shape, tuple(slices), role)
