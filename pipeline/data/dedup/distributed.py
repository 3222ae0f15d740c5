"""Tables, sorting and graphs that are divided over ranks: no rank holds all rows, and none receives much more than its share of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pipeline.common import mpi
from pipeline.common.mpi import Comm, exchange

SAMPLES = 64
"""Rows that a rank contributes on average to the choice of the ranges in sorted_over_ranks."""


def ask(comm: Comm, questions: np.ndarray, owners: np.ndarray, answer: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """Send every question to the rank that owns it, and return the answers in the order of the questions. Collective.

    Args:
        questions: (n,) of any dtype.
        owners: (n,) ranks.
        answer: returns one row for each question that this rank receives; called once, with (questions, asking ranks).
    """
    order = np.argsort(owners, kind="stable")
    rows = np.empty(len(questions), dtype=[("question", questions.dtype), ("asker", "<i4")])
    rows["question"], rows["asker"] = questions, comm.rank
    received = exchange(comm, rows, owners)
    answers = exchange(comm, answer(received["question"], received["asker"]), received["asker"])
    ordered = np.empty(len(questions), dtype=answers.dtype)
    ordered[order] = answers  # they arrive by owner, and of one owner in the order of the questions
    return ordered


def fetch(comm: Comm, numbers: np.ndarray, holders: np.ndarray, read: Callable[[Sequence[int]], list[Any]]) -> list[Any]:
    """Return values such as texts that other ranks hold, in the order of `numbers`. Collective.

    A rank sends about mpi.MESSAGE_BYTES at a time, also if many ranks ask for one large text.

    Args:
        numbers: (n,) distinct numbers of documents.
        holders: (n,) the ranks that hold them.
        read: returns strings by the numbers of documents that this rank holds.
    """
    rows = np.empty(len(numbers), dtype=[("number", "<i8"), ("asker", "<i4")])
    rows["number"], rows["asker"] = numbers, comm.rank
    pending = exchange(comm, rows, holders).tolist()
    received: list[list[Any]] = [[] for _ in range(comm.size)]
    start = 0
    while any(comm.allgather(start < len(pending))):
        outgoing: list[list[Any]] = [[] for _ in range(comm.size)]
        sent = 0
        while start < len(pending) and sent < mpi.MESSAGE_BYTES:
            number, asker = pending[start]
            (value,) = read([number])
            outgoing[asker].append(value)
            sent, start = sent + len(value), start + 1
        for sender, values in enumerate(comm.alltoall(outgoing)):
            received[sender] += values
    arrived = [value for values in received for value in values]
    ordered: list[Any] = [None] * len(numbers)
    for place, value in zip(np.argsort(holders, kind="stable").tolist(), arrived, strict=True):
        ordered[place] = value
    return ordered


def sorted_over_ranks(comm: Comm, rows: np.ndarray, fields: Sequence[str] = ("hash", "number")) -> np.ndarray:
    """Sort rows by `fields` over all ranks: each rank returns a range, in the order of the ranks. Collective.

    The ranges are chosen from a sample of rows, so that rows of one hash, which can be many, are divided as well.

    Args:
        fields: the first one is hash; together they distinguish all rows.
    """

    def ordered(rows: np.ndarray) -> np.ndarray:
        return rows[np.lexsort([rows[name] for name in reversed(fields)])]

    rows = ordered(rows)
    total = sum(comm.allgather(len(rows)))
    step = max(1, total // (SAMPLES * comm.size))
    sample = rows[list(fields)][step // 2 :: step].copy()
    samples = ordered(np.concatenate(comm.allgather(sample)))
    bounds = samples[np.arange(1, comm.size) * len(samples) // comm.size] if len(samples) else samples
    low, high = (np.searchsorted(bounds["hash"], rows["hash"], side=side) for side in ("left", "right"))
    for place in np.flatnonzero(low < high).tolist() if len(bounds) else ():  # of the hash of a bound: few unless it is frequent
        first, last = low[place], high[place]
        for name in fields[1:]:
            equal = bounds[name][first:last]
            first, last = (first + np.searchsorted(equal, rows[name][place], side=side) for side in ("left", "right"))
        low[place] = last
    return ordered(exchange(comm, rows, low))


def components(comm: Comm, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The connected components of a graph whose edges and vertices are divided over the ranks. Collective.

    Hooking and pointer jumping (Shiloach & Vishkin 1982, "An O(log n) parallel connectivity algorithm"). A vertex belongs to the rank
    `number % size`; a rank asks for each distinct parent once, so that a vertex with many edges costs a message per rank.

    Args:
        left: (edges,) int64 numbers of vertices, the edges of this rank.
        right: (edges,) their neighbors.

    Returns:
        vertices: (n,) sorted numbers of the vertices of this rank.
        labels: (n,) the lowest number in the component of each.
    """
    ends = np.unique(np.concatenate([left, right]))
    vertices = np.unique(exchange(comm, ends, ends % comm.size))
    parent = vertices
    while True:
        first, second = np.split(values_of(comm, vertices, parent, np.concatenate([left, right])), 2)
        apart = np.flatnonzero(first != second)
        if not any(comm.allgather(len(apart) > 0)):
            return vertices, parent
        left, right, first, second = left[apart], right[apart], first[apart], second[apart]  # connected vertices stay connected
        hooks = np.empty(len(apart), dtype=[("high", "<i8"), ("low", "<i8")])
        hooks["high"], hooks["low"] = np.maximum(first, second), np.minimum(first, second)
        hooks = np.unique(hooks)
        hooks = hooks[np.diff(hooks["high"], prepend=hooks["high"][:1] - 1) != 0]  # the lowest of each
        hooks = exchange(comm, hooks, hooks["high"] % comm.size)
        parent = parent.copy()
        np.minimum.at(parent, np.searchsorted(vertices, hooks["high"]), hooks["low"])
        changed = True
        while changed:
            jumped = values_of(comm, vertices, parent, parent)
            changed = any(comm.allgather(not np.array_equal(jumped, parent)))
            parent = jumped


def greedy_independent_set(comm: Comm, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Choose vertices one after the other, each if it has no edge from a chosen one: a maximal independent set. Collective.

    A vertex is decided as soon as those with an edge to it are (Blelloch, Fineman & Shun 2012, "Greedy sequential maximal independent set
    and matching are parallel on average"). An edge is sent once; the number of rounds is at most the length of the longest path.

    Args:
        edges: left_holder, right, right_holder and left: (edges,), sorted by left, those whose left vertex this rank holds. No cycles.

    Returns:
        vertices: (n,) sorted numbers of the vertices that this rank holds.
        chosen: (n,) bool.
    """
    incoming = exchange(comm, edges["right"].copy(), edges["right_holder"])
    vertices = np.union1d(edges["left"], incoming)
    undecided_before = np.bincount(np.searchsorted(vertices, incoming), minlength=len(vertices))
    starts, stops = (np.searchsorted(edges["left"], vertices, side=side) for side in ("left", "right"))
    chosen, decided = np.ones(len(vertices), dtype=bool), undecided_before == 0
    new = np.flatnonzero(decided)
    while any(comm.allgather(len(new) > 0)):
        counts = stops[new] - starts[new]
        places = np.arange(counts.sum()) + np.repeat(starts[new] - np.cumsum(counts) + counts, counts)
        rows = np.empty(len(places), dtype=[("right", "<i8"), ("chosen", "?")])
        rows["right"], rows["chosen"] = edges["right"][places], np.repeat(chosen[new], counts)
        rows = exchange(comm, rows, edges["right_holder"][places])
        reached = np.searchsorted(vertices, rows["right"])
        np.subtract.at(undecided_before, reached, 1)
        chosen[reached[rows["chosen"]]] = False
        reached = np.unique(reached)
        new = reached[~decided[reached] & ((undecided_before[reached] == 0) | ~chosen[reached])]
        decided[new] = True
    return vertices, chosen


def values_of(comm: Comm, vertices: np.ndarray, values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The values of vertices by their numbers: (numbers,). Collective.

    Args:
        vertices: sorted numbers of the vertices of this rank, which are those with `number % size == rank`.
        values: (vertices,) of any dtype.
        numbers: of vertices of any rank, with repetitions.
    """
    distinct, places = np.unique(numbers, return_inverse=True)
    answers = ask(comm, distinct, distinct % comm.size, lambda asked, _: values[np.searchsorted(vertices, asked)])
    return answers[places]


def slices(comm: Comm, rows: int, slice_rows: int) -> int:
    """The number of slices in which all ranks process their rows, such that no rank sends more than about `slice_rows` at a time."""
    return max(1, *comm.allgather(-(-rows // slice_rows)))


def slice_of(hashes: np.ndarray, count: int) -> np.ndarray:
    """The slice of every uint64 hash, by its upper bits: (n,) uint64."""
    return (hashes >> np.uint64(32)) * np.uint64(count) >> np.uint64(32)
