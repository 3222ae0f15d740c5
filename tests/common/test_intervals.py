"""Intervals of time: union, difference and intersection against sets of unit intervals."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.common.intervals import common, length, union, without

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda pair: (float(pair[0]), float(sum(pair)))), max_size=8)


def seconds(intervals: list[tuple[float, float]]) -> set[int]:
    """The unit intervals that are covered, by their begin."""
    return {place for begin, end in intervals for place in range(int(begin), int(end))}


@given(INTERVALS, INTERVALS)
def test_intervals(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> None:
    pairs = (
        (union(first), seconds(first)),
        (without(union(first), union(second)), seconds(first) - seconds(second)),
        (common(union(first), union(second)), seconds(first) & seconds(second)),
    )
    for found, expected in pairs:
        assert seconds(found) == expected
        assert length(found) == len(expected), "no overlap"
