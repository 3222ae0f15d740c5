"""Distribution of a model's blocks over the pipeline stages by FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import accumulate
from math import inf

#: By how much the largest cost of a stage may exceed the smallest possible one, for numbers of blocks that are more even: the additional
#: block of a stage needs memory, and costs are FLOPs, which are no more exact as times.
TOLERANCE = 0.02


@cache
def balanced(first: float, blocks: tuple[float, ...], last: float, stages: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage, so that the largest cost of a stage is within TOLERANCE of the smallest possible one.

    Among these distributions, one with the most even numbers of blocks: their sum of squares is the smallest.

    Args:
        first: cost of what the first stage computes besides its blocks.
        blocks: cost of each block, in order; at least as many as stages.
        last: cost of what the last stage computes besides its blocks.
        stages: number of stages; each gets at least one block.
    """
    sums = [0.0, *accumulate(blocks)]

    def cost(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)

    limit, _ = _smallest(stages, len(blocks), cost, max)
    allowed = limit * (1 + TOLERANCE)

    def unevenness(stage: int, start: int, stop: int) -> float:
        return (stop - start) ** 2 if cost(stage, start, stop) <= allowed else inf

    return _smallest(stages, len(blocks), unevenness, float.__add__)[1]


def _smallest(
    stages: int, blocks: int, cost: Callable[[int, int, int], float], combine: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The smallest combined cost(stage, start, stop) of a distribution, and its numbers of blocks; dynamic programming over the stages."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage in range(stages):
        following = stages - 1 - stage
        best = {
            stop: min(
                (combine(before, float(cost(stage, start, stop))), (*sizes, stop - start))
                for start, (before, sizes) in best.items()
                if start < stop
            )
            for stop in (range(stage + 1, blocks - following + 1) if following else [blocks])
        }
    return best[blocks]
