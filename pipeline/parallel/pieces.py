"""Which part of which full weight a rank holds. The parallel plan says how a weight is cut; here that becomes numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor

from pipeline.models.plan import SPLITS


@dataclass(frozen=True)
class Slice:
    """The slice `start:stop` along `dim`, which the ranks of a mesh axis share out."""

    axis: str
    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """A rank's part of a full weight: all of it, but for its slices.

    Attributes:
        name: the weight's name in the whole model; one that stands there twice (a tied head) has its first.
        full_shape: its shape there.
        slices: at most one a dim.
        role: its role in the plan.
        shared: "tied_embedding" or "pipeline" where further stages hold the weight: the last one, or all.
        copy: whether another rank of the pipeline holds it too and counts it.
    """

    name: str
    full_shape: tuple[int, ...]
    slices: tuple[Slice, ...] = ()
    role: str = "replicate"
    shared: str = ""
    copy: bool = False

    def is_sliced_along(self, axis: str) -> bool:
        """Whether the ranks of a mesh axis hold different parts."""
        return any(cut.axis == axis for cut in self.slices)

    def start(self, dim: int) -> int:
        """The full weight's index that is 0 in the piece."""
        return next((cut.start for cut in self.slices if cut.dim == dim), 0)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the piece."""
        sizes = list(self.full_shape)
        for cut in self.slices:
            sizes[cut.dim] = cut.stop - cut.start
        return tuple(sizes)

    @property
    def elements(self) -> int:
        """Of the piece."""
        return prod(self.shape)

    def of(self, full: Tensor) -> Tensor:
        """The piece of a full weight, as a view."""
        assert tuple(full.shape) == self.full_shape, f"{self.name}: {tuple(full.shape)} is not {self.full_shape}"
        for cut in self.slices:
            full = full.narrow(cut.dim, cut.start, cut.stop - cut.start)
        return full


def slice_weight(name: str, shape: tuple[int, ...], role: str, axes: Mapping[str, tuple[int, int]]) -> Piece:
    """The piece of one rank.

    Args:
        name: the weight's name in the whole model.
        shape: its full shape, (output, input) for a matrix, (experts, output, input) for a stack of experts.
        role: its role in the plan.
        axes: mesh axis -> (ranks, this rank's index), for "tensor" and "expert".
    """
    cuts = []
    for axis, dim in SPLITS[role].items():
        ranks, rank = axes[axis]
        if ranks == 1:
            continue
        size = shape[dim]
        assert role == "vocab" or size % ranks == 0, f"{name}: {size} does not divide into {ranks} pieces"
        width = -(-size // ranks)  # the last pieces of a vocabulary may be shorter
        cuts.append(Slice(axis, dim, min(rank * width, size), min((rank + 1) * width, size)))
    return Piece(name, shape, tuple(cuts), role)
