"""Which part of which full weight a rank holds. The parallel plan says how a weight is cut; here that becomes numbers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pipeline.models.plan import SPLIT_DIM


@dataclass(frozen=True)
class Piece:
    """The slice `start:stop` along `dim` of a full weight; dim is None for a weight that every tensor rank holds whole.

    Attributes:
        name: the weight's name in the whole model; a tied head has the embedding's.
        full_shape: its shape there.
        copy: whether another stage holds the same weight and counts it (the head's copy of a tied embedding).
    """

    name: str
    full_shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    stop: int = 0
    copy: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the piece."""
        if self.dim is None:
            return self.full_shape
        return (*self.full_shape[: self.dim], self.stop - self.start, *self.full_shape[self.dim + 1 :])

    def of(self, full: Tensor) -> Tensor:
        """The piece of a full weight, as a view."""
        assert tuple(full.shape) == self.full_shape, f"{self.name}: {tuple(full.shape)} is not {self.full_shape}"
        return full if self.dim is None else full.narrow(self.dim, self.start, self.stop - self.start)


@dataclass(frozen=True)
class Fragment:
    """The run of elements `start : start + n` of a flattened piece that this rank optimizes.

    Attributes:
        piece: of which full weight, and where in it.
        start: first element in the flattened piece.
        tensors: "weight" and both moments -> flat fp32 views of n elements, written in place on load.
        owned: whether this rank's copy is the one to save; another rank holds the same elements otherwise.
    """

    piece: Piece
    start: int
    tensors: dict[str, Tensor]
    owned: bool


def cut(name: str, shape: tuple[int, ...], role: str, ranks: int, rank: int, *, copy: bool = False) -> Piece:
    """The piece of one tensor rank.

    Args:
        name: the weight's name in the whole model.
        shape: its full shape, (output, input) for a matrix.
        role: its role in the plan: column cuts the output, row the input, vocab the vocabulary (the last pieces may be shorter).
        ranks: tensor ranks.
        rank: this one.
        copy: see Piece.
    """
    dim = SPLIT_DIM[role]
    if ranks == 1 or dim is None or (role == "row" and len(shape) == 1):
        return Piece(name, shape, copy=copy)
    size = shape[dim]
    assert role == "vocab" or size % ranks == 0, f"{name}: {size} does not divide into {ranks} pieces"
    width = -(-size // ranks)
    return Piece(name, shape, dim, min(rank * width, size), min((rank + 1) * width, size), copy=copy)
