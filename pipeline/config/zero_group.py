"""Arithmetic of parallel.zero_group: the ranks over which ZeRO shards, as a block of the axes of data parallelism."""

from __future__ import annotations

from pipeline.config.parallel import ParallelConfig

#: Values of parallel.zero_group besides a number of ranks.
JOB, NODE = "job", "node"


def group_ranks(parallel: ParallelConfig, tasks_per_node: int, world_size: int) -> int | None:
    """Return the number of data x expert x context ranks over which ZeRO shards.

    Args:
        tasks_per_node: ranks of a node, which have successive numbers.
        world_size: ranks of the job, a multiple of parallel.model_ranks.

    Returns:
        None if a node does not hold whole groups: its ranks are those of several pipeline stages in part, or of a tensor group in part.
    """
    stage = world_size // parallel.pipeline
    dense = stage // parallel.tensor
    if parallel.zero_group == JOB:
        return dense
    if parallel.zero_group != NODE:
        return int(parallel.zero_group)
    if world_size <= tasks_per_node or tasks_per_node % stage == 0:
        return dense
    return tasks_per_node // parallel.tensor if tasks_per_node % parallel.tensor == 0 and stage % tasks_per_node == 0 else None


def block(ranks: int, parallel: ParallelConfig, data: int) -> tuple[int, int, int] | None:
    """Return the sizes of a group along the data, expert and context axes; None if groups of this size do not divide the axes.

    A group has successive ranks: some of the context ranks, or all of them and some of the expert ranks, or all of both and some of the
    data ranks. The groups of all expert ranks then have the same shape.

    Args:
        data: size of the data axis.
    """
    sizes = []
    for size in (parallel.context, parallel.expert, data):
        if ranks % size == 0:
            sizes.append(size)
            ranks //= size
        elif size % ranks == 0:
            sizes.append(ranks)
            ranks = 1
        else:
            return None
    context, expert, data = sizes
    return (data, expert, context) if ranks == 1 else None


def legal(parallel: ParallelConfig, data: int) -> list[int]:
    """Return the sizes of groups that are smaller than the job, the smallest first."""
    dense = parallel.context * parallel.expert * data
    return [ranks for ranks in range(2, dense) if dense % ranks == 0 and block(ranks, parallel, data)]
