"""Newton-Schulz of the matrices of all ranks, each on one home rank among those that hold pieces of it.

The update of a matrix needs all of its elements. Its ranks are those of a tensor group, with a slice of the matrix each, times those over
which ZeRO shards, with a range of the elements of a slice each. Elements travel to the home in two all-to-all exchanges, first within
the group of ZeRO and then within the tensor group, and the result travels back the same way. Elements travel in the dtype in which
Newton-Schulz computes, so that nothing is lost. Without ZeRO, data ranks hold equal copies: nothing travels to the home within them, and
the result goes to all of them, so that copies stay equal in every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from pipeline.training.matrix_layout import LocalMatrix, Space, Spread, choose_homes, local_matrices, round_numbers
from pipeline.training.matrix_rule import MatrixRule

#: Most elements of this rank's master weights that are updated at once, up to one bucket more: bounds the memory. With other ranks there
#: are more, since few rounds divide the work well.
ELEMENTS_AT_ONCE, ELEMENTS_OF_ONE_RANK = 1 << 27, 1 << 24

Orthogonalize = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True)
class Update:
    """What is subtracted from successive elements of a master weight, times the learning rate.

    Attributes:
        start: its first element.
        values: flat, in the dtype of Newton-Schulz.
        factor: of the values.
    """

    master: Tensor
    start: int
    values: Tensor
    factor: float


def rounds_of(
    spaces: Iterable[Space], rule: MatrixRule, tensor: ProcessGroup, orthogonalize: Orthogonalize, adjust: Callable[[int, int], float]
) -> list[Round]:
    """Return the rounds in which this rank's matrices are updated, with those of the other ranks: each calls `updates` in their order.

    Args:
        spaces: with all matrices of this rank.
        tensor: the tensor ranks.
        orthogonalize: matrices of one shape -> those of the results.
        adjust: (rows, columns) of a matrix -> factor of its update.
    """
    groups: dict[ProcessGroup, list[Space]] = {}
    for space in spaces:
        groups.setdefault(space.group, []).append(space)
    return [
        Round(part, rule, group, tensor, orthogonalize, adjust)
        for group, members in groups.items()
        for part in divide_in_rounds(members, elements_at_once(group.size() * tensor.size()))
    ]


def elements_at_once(ranks: int) -> int:
    """Return the most elements of a rank in a round, of the weights that so many ranks hold."""
    return ELEMENTS_OF_ONE_RANK if ranks == 1 else ELEMENTS_AT_ONCE


def divide_in_rounds(spaces: Sequence[Space], most: int) -> list[list[Space]]:
    """Return successive spaces in rounds of about equal size, of at most `most` elements up to one space more. Equal on all ranks."""
    rounds: dict[int, list[Space]] = {}
    for space, number in zip(spaces, round_numbers([space.master.numel() for space in spaces], most), strict=True):
        rounds.setdefault(number, []).append(space)
    return list(rounds.values())


class Round:
    """Matrices whose pieces are divided over one group of ZeRO, and which are updated at once.

    Args: see rounds_of; group: that of all spaces.
    """

    def __init__(
        self,
        spaces: Sequence[Space],
        rule: MatrixRule,
        group: ProcessGroup,
        tensor: ProcessGroup,
        orthogonalize: Orthogonalize,
        adjust: Callable[[int, int], float],
    ) -> None:
        self.masters = [space.master for space in spaces]
        self._orthogonalize = orthogonalize
        self._spaces, self._group, self._tensor = list(spaces), group, tensor
        self._matrices = [
            matrix
            for index, space in enumerate(spaces)
            for piece, first in space.pieces
            for matrix in local_matrices(piece, rule, index, first, adjust)
        ]
        rank, self._column = group.rank(), tensor.rank()
        homes = choose_homes(self._matrices, group.size(), tensor.size())
        #: Matrices of each rank of the group; of them, those that each tensor rank computes.
        self._by_rank: list[list[LocalMatrix]] = [[] for _ in range(group.size())]
        self._by_column: list[list[LocalMatrix]] = [[] for _ in range(tensor.size())]
        for matrix, (home, column) in zip(self._matrices, homes, strict=True):
            self._by_rank[home].append(matrix)
            if home == rank:
                self._by_column[self._column if column == -1 else column].append(matrix)

    def updates(self, inputs: dict[Tensor, Tensor]) -> list[Update]:
        """Return the updates of all matrices that this rank's master weights have elements of. Collective.

        Args:
            inputs: master weight -> what is orthogonalized, of its shape, in the dtype in which it is sent and orthogonalized. Emptied, so
                that the memory of what has been sent is free.
        """
        self._empty = inputs[self.masters[0]].new_empty(0)
        # No name holds what is passed on: each step frees the tensors of the one before.
        matrices = self._whole(self._to_homes([inputs.pop(master).reshape(-1) for master in self.masters]))
        return self._from_homes(self._slices_of(_by_shape(matrices, self._orthogonalize)))

    def _to_homes(self, flat: list[Tensor]) -> dict[LocalMatrix, Tensor]:
        """Return the slices of the matrices whose home is this rank of the group."""
        mine, rank = self._by_rank[self._group.rank()], self._group.rank()
        divided = [m for m in mine if self._spaces[m.space].divided]
        sent = [[self._part(flat, m, rank) for m in there if self._spaces[m.space].divided] for there in self._by_rank]
        sizes = [[self._size(m, other) for m in divided] for other in range(self._group.size())]
        parts = _exchange(sent, sizes, self._group, self._empty)
        # Copies: views of the weights of a bucket would keep the memory of all of them.
        whole = {m: self._part(flat, m, rank).clone() for m in mine if not self._spaces[m.space].divided}
        whole |= {m: torch.cat([of_rank[index] for of_rank in parts]) for index, m in enumerate(divided)}
        return {m: values.view(m.rows, m.columns) for m, values in whole.items()}

    def _from_homes(self, slices: Mapping[LocalMatrix, Tensor]) -> list[Update]:
        """Return the updates of the master weights from the slices whose home is this rank of the group."""
        mine, rank = self._by_rank[self._group.rank()], self._group.rank()
        # What is not divided goes to every rank as a whole.
        sent = [[self._of(slices[m], m, other) for m in mine] for other in range(self._group.size())]
        sizes = [[self._size(m, rank) for m in there] for there in self._by_rank]
        parts = _exchange(sent, sizes, self._group, self._empty)
        return [
            Update(self._spaces[m.space].master, self._spaces[m.space].held(rank, m)[0], part, m.factor)
            for there, values in zip(self._by_rank, parts, strict=True)
            for m, part in zip(there, values, strict=True)
            if part.numel()
        ]

    def _whole(self, slices: Mapping[LocalMatrix, Tensor]) -> dict[LocalMatrix, Tensor]:
        """Return the matrices that this rank computes."""
        computed = self._by_column[self._column]
        sliced = [m for m in computed if m.spread in (Spread.ROWS, Spread.COLUMNS)]
        sent = [[slices[m] for m in there if m.spread in (Spread.ROWS, Spread.COLUMNS)] for there in self._by_column]
        parts = _exchange(sent, [[m.elements for m in sliced]] * self._tensor.size(), self._tensor, self._empty)
        whole = {m: slices[m] for m in computed}
        for index, m in enumerate(sliced):
            of_ranks = [part[index].view(m.rows, m.columns) for part in parts]
            whole[m] = torch.cat(of_ranks, dim=0 if m.spread is Spread.ROWS else 1)
        return whole

    def _slices_of(self, results: Mapping[LocalMatrix, Tensor]) -> dict[LocalMatrix, Tensor]:
        """Return the slices of the results of this rank of the group on all tensor ranks."""
        shared = [[m for m in there if m.spread is not Spread.OWN] for there in self._by_column]
        sent = [[_slice(results[m], m, column) for m in shared[self._column]] for column in range(self._tensor.size())]
        parts = _exchange(sent, [[m.elements for m in there] for there in shared], self._tensor, self._empty)
        slices = {m: result for m, result in results.items() if m.spread is Spread.OWN}
        for there, values in zip(shared, parts, strict=True):
            slices |= dict(zip(there, values, strict=True))
        return slices

    def _part(self, flat: list[Tensor], matrix: LocalMatrix, rank: int) -> Tensor:
        """The elements of a matrix that this rank holds."""
        start, stop = self._spaces[matrix.space].held(rank, matrix)
        return flat[matrix.space][start:stop]

    def _size(self, matrix: LocalMatrix, rank: int) -> int:
        """Number of elements of a matrix that a rank of the group holds."""
        start, stop = self._spaces[matrix.space].held(rank, matrix)
        return stop - start

    def _of(self, values: Tensor, matrix: LocalMatrix, rank: int) -> Tensor:
        """The elements of a slice that a rank of the group holds."""
        space = self._spaces[matrix.space]
        start, stop = space.held(rank, matrix)
        skipped = start + rank * space.master.numel() - matrix.first if space.divided else 0
        return values.reshape(-1)[skipped : skipped + stop - start] if stop > start else values.new_empty(0)


def _slice(result: Tensor, matrix: LocalMatrix, column: int) -> Tensor:
    """What a tensor rank holds of a matrix."""
    if matrix.spread is Spread.ROWS:
        return result[column * matrix.rows : (column + 1) * matrix.rows]
    if matrix.spread is Spread.COLUMNS:
        return result[:, column * matrix.columns : (column + 1) * matrix.columns]
    return result


def _exchange(sent: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], group: ProcessGroup, empty: Tensor) -> list[list[Tensor]]:
    """Send tensors to every rank of a group, and return the flat tensors that each of them has sent.

    Args:
        sent: for each rank, what it receives.
        sizes: for each rank, the elements of the tensors that it sends. Either `sent` or `sizes` has the matrices of all ranks, so that no
            rank enters the collective if none of them has any.
        group: the ranks.
        empty: of the dtype and on the device of the tensors, without elements.
    """
    if not any(sent) and not any(sizes):
        return [[] for _ in sizes]
    if group.size() == 1:
        return [[tensor.reshape(-1) for tensor in sent[0]]]
    flat = torch.cat([empty, *(tensor.reshape(-1) for tensors in sent for tensor in tensors)])
    received = [sum(counts) for counts in sizes]
    result = flat.new_empty(sum(received))
    dist.all_to_all_single(result, flat, received, [sum(tensor.numel() for tensor in tensors) for tensors in sent], group=group)
    return [list(part.split(list(counts))) for part, counts in zip(result.split(received), sizes, strict=True)]


def _by_shape(matrices: dict[LocalMatrix, Tensor], orthogonalize: Orthogonalize) -> dict[LocalMatrix, Tensor]:
    """Orthogonalize matrices, those of one shape at once. `matrices` is emptied, so that the memory of those that are done is free."""
    shapes: dict[tuple[int, int], list[LocalMatrix]] = {}
    for matrix in matrices:
        shapes.setdefault(matrix.full, []).append(matrix)
    results: dict[LocalMatrix, Tensor] = {}
    for group in shapes.values():
        results |= dict(zip(group, orthogonalize([matrices.pop(m) for m in group]), strict=True))
    return results
