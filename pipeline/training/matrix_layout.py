"""What a rank holds of the matrices that Muon updates, and on which rank each is orthogonalized: arithmetic, without communication."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from torch import Tensor
from torch.distributed import ProcessGroup

from pipeline.parallel.pieces import Piece
from pipeline.training.matrix_rule import MatrixRule


class Spread(Enum):
    """What the tensor ranks hold of a matrix."""

    ROWS = "a slice of its rows each"
    COLUMNS = "a slice of its columns each"
    COPIES = "the whole matrix each"
    OWN = "other matrices each"


@dataclass(frozen=True)
class LocalMatrix:
    """A matrix, of which a rank's piece of a weight holds all elements or a slice. The same on all ranks that hold the weight.

    Attributes:
        space: index of the flat space that holds the piece.
        first: first element in this space; the elements of the slice are successive.
        rows, columns: of the slice.
        full: rows and columns of the matrix.
        spread: what the tensor ranks hold.
        factor: of the update, which adjusts the learning rate.
    """

    space: int
    first: int
    rows: int
    columns: int
    full: tuple[int, int]
    spread: Spread
    factor: float

    @property
    def elements(self) -> int:
        """Number of elements of the slice."""
        return self.rows * self.columns


def local_matrices(piece: Piece, rule: MatrixRule, space: int, first: int, adjust: Callable[[int, int], float]) -> list[LocalMatrix]:
    """Return the matrices of a piece in the order of their elements.

    Args:
        piece: of a weight that Muon updates.
        space: index of the flat space that holds it.
        first: its first element there.
        adjust: (rows, columns) of a full matrix -> factor of its update.
    """
    matrices = rule.matrices(piece.name, piece.full_shape)
    assert matrices is not None, piece.name
    sizes, spread = [matrices.count, matrices.rows, matrices.columns], Spread.COPIES
    # The dims of the weight among (count, rows, columns): its last one is the columns.
    shift = 3 - len(piece.full_shape)
    for part in piece.slices:
        width, dim = part.stop - part.start, part.dim + shift
        if part.axis == "tensor" and dim == 1 and len(piece.full_shape) == 2 and matrices.count > 1:
            assert width % matrices.rows == 0 == part.start % matrices.rows, f"{piece.name}: a head is divided among tensor ranks"
            sizes[0], spread = width // matrices.rows, Spread.OWN
            continue
        sizes[dim] = width
        if part.axis == "tensor":
            spread = {0: Spread.OWN, 1: Spread.ROWS, 2: Spread.COLUMNS}[dim]  # whole experts, rows or columns
    count, rows, columns = sizes
    full, size = (matrices.rows, matrices.columns), rows * columns
    return [LocalMatrix(space, first + n * size, rows, columns, full, spread, adjust(*full)) for n in range(count)]


def planned_matrices(piece: Piece, rule: MatrixRule) -> tuple[LocalMatrix, ...]:
    """Return the matrices of a piece for a plan, in which no tensor has elements; none of a weight that Muon does not update."""
    return tuple(local_matrices(piece, rule, 0, 0, lambda _rows, _columns: 1.0)) if rule.is_hidden(piece) else ()


def round_numbers(sizes: Sequence[int], most: int) -> list[int]:
    """Return the number of the round of successive spaces: of about equal size, of at most `most` elements up to one space more.

    Args:
        sizes: elements of the spaces.
        most: elements of a round.
    """
    size = sum(sizes) / math.ceil(sum(sizes) / most)
    return [int(first / size) for first in itertools.accumulate(sizes[:-1], initial=0)]


def work(matrix: LocalMatrix) -> int:
    """Return the FLOPs of an iteration of Newton-Schulz on the full matrix, up to a factor."""
    short, long = sorted(matrix.full)
    return 2 * short * short * long + short**3


def choose_homes(matrices: Sequence[LocalMatrix], ranks: int, tensor: int) -> list[tuple[int, int]]:
    """Return the index of the home of every matrix in the group of ZeRO and in the tensor group.

    The largest matrix first, always to the rank with the least work (longest processing time first, Graham 1969,
    https://doi.org/10.1137/0117039). The result depends only on sizes and order, which all ranks of both groups share.

    Args:
        ranks: size of the group of ZeRO.
        tensor: size of the tensor group.
    """
    order = sorted(range(len(matrices)), key=lambda index: -work(matrices[index]))
    homes = [(0, 0)] * len(matrices)
    rows = [(0, rank) for rank in range(ranks)]
    for index in order:  # each tensor rank has such matrices of its own, and computes them
        if matrices[index].spread is Spread.OWN:
            load, rank = heapq.heappop(rows)
            homes[index] = rank, -1
            heapq.heappush(rows, (load + work(matrices[index]), rank))
    slots = [(load, rank, column) for load, rank in rows for column in range(tensor)]
    heapq.heapify(slots)
    for index in order:
        if matrices[index].spread is not Spread.OWN:
            load, rank, column = heapq.heappop(slots)
            homes[index] = rank, column
            heapq.heappush(slots, (load + work(matrices[index]), rank, column))
    return homes


@dataclass(frozen=True)
class Space:
    """Weights that are flattened one after another: a bucket that ZeRO divides into partitions, or one weight that is not divided.

    Attributes:
        master: what this rank holds of it: its partition, or all of it; fp32.
        pieces: this rank's pieces of the weights, each with its first element.
        group: the ranks with the same pieces.
        divided: whether each of them holds an equal partition, in order; otherwise all of them hold all elements.
    """

    master: Tensor
    pieces: tuple[tuple[Piece, int], ...]
    group: ProcessGroup
    divided: bool

    def held(self, rank: int, matrix: LocalMatrix) -> tuple[int, int]:
        """First and last + 1 element of a matrix that a rank of the group holds, counted from the begin of its partition; maybe none."""
        if not self.divided:
            return matrix.first, matrix.first + matrix.elements
        size = self.master.numel()
        start = max(matrix.first - rank * size, 0)
        return start, max(start, min(matrix.first + matrix.elements - rank * size, size))
