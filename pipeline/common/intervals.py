"""Sets of intervals of time: union, intersection, difference and length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

#: Begin and end, in any unit of time.
Interval = tuple[float, float]


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of intervals that do not overlap."""
    return sum(end - begin for begin, end in intervals)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the time that any of the intervals covers, as ascending intervals that do not overlap."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the time that intervals cover and others do not; both as `union` returns them."""
    remaining: list[Interval] = []
    place = 0
    for begin, end in intervals:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        other = place
        while other < len(others) and others[other][0] < end:
            if others[other][0] > begin:
                remaining.append((begin, others[other][0]))
            begin = max(begin, others[other][1])
            other += 1
        if begin < end:
            remaining.append((begin, end))
    return remaining


def common(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the time that both cover; both as `union` returns them."""
    return without(intervals, without(intervals, others))
