"""The update of Muon on a rank: what its homes receive, compute, send and allocate, as training/matrix_homes.py does it.

The homes are those of the engine (choose_homes). Of the ranks of a group, the largest share counts: all wait for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from pipeline.config.hardware import Hardware
from pipeline.config.layout import Layout
from pipeline.planner import kernel_time
from pipeline.planner.operations import Collective, Product
from pipeline.planner.planned_buckets import PlannedBucket
from pipeline.planner.state_memory import StateFormat
from pipeline.training.matrix_homes import elements_at_once
from pipeline.training.matrix_layout import LocalMatrix, Spread, choose_homes, round_numbers
from pipeline.training.muon import at_once

#: What the products are called in the table of operations.
NAME = "newton-schulz"


@dataclass(frozen=True)
class Homes:
    """The largest share of the ranks of a group in the matrices that they orthogonalize; numbers of elements.

    Attributes:
        home: of the slices of the matrices whose home is a rank of the group of ZeRO.
        sliced: of these, those of which each tensor rank holds a slice.
        returned: of the slices of the results that a rank receives from its tensor ranks.
        computed: of the matrices that a rank orthogonalizes.
        joined: of these, those of which each tensor rank holds a slice.
        spread: what a rank sends of its results to its tensor ranks.
        columns: of these, slices of columns, which are copied before.
        shapes: for each kind of share, (rows, columns) of a matrix -> how many of them a rank orthogonalizes.
    """

    home: int
    sliced: int
    returned: int
    computed: int
    joined: int
    spread: int
    columns: int
    shapes: tuple[tuple[tuple[tuple[int, int], int], ...], ...]


@dataclass(frozen=True)
class MatrixRound:
    """Matrices of a rank that are updated at once; one group of ZeRO holds their pieces.

    Attributes:
        axis: the ranks of the group.
        ranks: number of these ranks.
        tensor: number of tensor ranks.
        divided: whether ZeRO divides the weights; otherwise all ranks hold all of them.
        held: elements that a rank holds, with padding.
        whole: elements of all ranks of the group, without padding.
        homes: the largest share of a rank.
    """

    axis: str
    ranks: int
    tensor: int
    divided: bool
    held: int
    whole: int
    homes: Homes


def matrix_rounds(buckets: Iterable[PlannedBucket], layout: Layout, zero_stage: int) -> list[MatrixRound]:
    """Return the rounds in which a rank updates its matrices of Muon, in their order; none for other optimizers.

    Args:
        zero_stage: 0 divides nothing.
    """
    of_axis: dict[str, list[PlannedBucket]] = {}
    for bucket in buckets:
        if bucket.trained and bucket.matrices:
            of_axis.setdefault(bucket.shards_axis, []).append(bucket)
    result = []
    for axis, members in of_axis.items():
        ranks, divided = members[0].ranks, zero_stage > 0
        parts = ranks if divided else 1
        spaces = [(b.elements // parts, tuple(b.matrices)) for b in members]
        rounds: dict[int, list[tuple[int, tuple[LocalMatrix, ...]]]] = {}
        numbers = round_numbers([size for size, _ in spaces], elements_at_once(ranks * layout.tensor))
        for space, number in zip(spaces, numbers, strict=True):
            rounds.setdefault(number, []).append(space)
        for part in rounds.values():
            held, matrices = sum(size for size, _ in part), tuple(matrix for _, some in part for matrix in some)
            whole, homes = sum(matrix.elements for matrix in matrices), _homes(matrices, ranks, layout.tensor)
            result.append(MatrixRound(axis, ranks, layout.tensor, divided, held, whole, homes))
    return result


@lru_cache(maxsize=256)
def _homes(matrices: tuple[LocalMatrix, ...], ranks: int, tensor: int) -> Homes:
    """The largest shares of the ranks of a group."""
    of_rank: list[Counter[str]] = [Counter() for _ in range(ranks)]
    slots: dict[tuple[int, int], Counter[str]] = {}
    shapes: dict[tuple[int, int], Counter[tuple[int, int]]] = {}
    for matrix, (rank, column) in zip(matrices, choose_homes(matrices, ranks, tensor), strict=True):
        sliced, full = matrix.spread in (Spread.ROWS, Spread.COLUMNS), matrix.full[0] * matrix.full[1]
        row, slot = of_rank[rank], slots.setdefault((rank, column), Counter())
        row["home"] += matrix.elements
        row["sliced"] += matrix.elements if sliced else 0
        row["returned"] += 0 if matrix.spread is Spread.OWN else matrix.elements
        slot["computed"] += full
        slot["joined"] += full if sliced else 0
        slot["columns"] += full if matrix.spread is Spread.COLUMNS else 0
        slot["spread"] += 0 if matrix.spread is Spread.OWN else full if sliced else full * tensor
        shapes.setdefault((rank, column), Counter())[matrix.full] += 1
    for rank, column in [slot for slot in slots if slot[1] == -1]:  # each tensor rank computes these, beside what it has of the others
        others = [other for other in slots if other[0] == rank and other[1] >= 0]
        for other in others:
            slots[other].update(slots[rank, column])
            shapes[other].update(shapes[rank, column])
    most = {name: max(row[name] for row in of_rank) for name in ("home", "sliced", "returned")}
    most |= {name: max(slot[name] for slot in slots.values()) for name in ("computed", "joined", "spread", "columns")}
    return Homes(**most, shapes=tuple({tuple(sorted(counts.items())) for counts in shapes.values()}))


def exchanges(rounds: Sequence[MatrixRound], element_bytes: int) -> Iterator[Collective]:
    """Yield the exchanges of an update, each with the bytes that the busiest rank sends or receives.

    Args:
        element_bytes: of an element in Newton-Schulz.
    """
    for part in rounds:
        homes = part.homes
        to_homes = [(part.axis, max(part.held, homes.home))] if part.divided else []
        back = (part.axis, max(part.held, homes.home) if part.divided else max(part.whole, part.ranks * homes.home))
        joined, spread = ("tensor", max(homes.sliced, homes.joined)), ("tensor", max(homes.spread, homes.returned))
        for axis, elements in (*to_homes, joined, spread, back):
            if elements and (part.tensor if axis == "tensor" else part.ranks) > 1:
                yield Collective("all_to_all", axis, "update", float(elements * element_bytes))


def products(rounds: Sequence[MatrixRound], state_format: StateFormat, hardware: Hardware) -> Counter[Product]:
    """Return the products of Newton-Schulz of the rank of each round that takes longest for them, each with their number.

    Five iterations of 4 a^2 b + 2 a^3 FLOPs each for an (a, b) matrix, a <= b.
    """
    total: Counter[Product] = Counter()
    for part in rounds:
        shares = [_products(share, state_format) for share in part.homes.shapes]
        total.update(max(shares, key=partial(products_time, hardware=hardware)))
    return total


def _products(shapes: Sequence[tuple[tuple[int, int], int]], state_format: StateFormat) -> Counter[Product]:
    """The products of the matrices of a rank, and how often each is computed."""
    counts: Counter[Product] = Counter()
    for (rows, columns), count in shapes:
        short, long = sorted((rows, columns))
        most = at_once(rows, columns)
        for batch, calls in ((most, count // most), (count % most, 1)):
            if batch and calls:
                for n, k in ((short, long), (short, short), (long, short)):
                    product = Product(NAME, "update", short, n, k, batch, state_format.weight_bytes)
                    counts[product] += calls * state_format.newton_schulz_steps
    return counts


def products_time(counts: Mapping[Product, int], hardware: Hardware) -> float:
    """Return the seconds of products, of which each is computed some times."""
    return sum(count * kernel_time.product_time(product, hardware)[0] for product, count in counts.items())


def update_bytes(rounds: Sequence[MatrixRound], element_bytes: int, *, batched: bool = True) -> float:
    """Return the most bytes that the update allocates besides weights, gradients and optimizer state.

    Args:
        element_bytes: of an element in Newton-Schulz.
        batched: as on a GPU, some matrices are orthogonalized at once; otherwise one after another.
    """
    return float(max((element_bytes * _exchanged(part, batched=batched) for part in rounds), default=0))


def _exchanged(part: MatrixRound, *, batched: bool) -> int:
    """Most elements in the dtype of Newton-Schulz, from the inputs of a round to its results on their way back."""
    homes, alone = part.homes, part.ranks == 1
    if part.divided:
        to_homes = part.held + (homes.home if alone else max(part.held + homes.home, 2 * homes.home))
        back = homes.home if alone else 2 * homes.home + part.held
    else:
        to_homes, back = part.held + homes.home, homes.home if alone else homes.home + part.ranks * homes.home + part.whole
    moments = [to_homes, homes.computed + _orthogonalizing(homes, batched=batched), back]
    if part.tensor > 1:
        moments += [homes.home + homes.joined + max(homes.sliced, homes.joined)]
        moments += [homes.computed + homes.spread + max(homes.columns, homes.returned)]
    return max(moments)


def _orthogonalizing(homes: Homes, *, batched: bool) -> int:
    """Elements that are allocated beside all matrices of a rank: results of a shape, iterates, and two products of their short sides."""
    most = 0
    for (rows, columns), count in (shape for share in homes.shapes for shape in share):
        short, size = min(rows, columns), rows * columns
        batch = min(count, at_once(rows, columns)) if batched else 1
        # Of those of the last batch, the result is an iterate, and on a GPU they are copied to one tensor.
        most = max(most, count * size + batch * ((2 if batched else 1) * size + 2 * short * short))
    return most
