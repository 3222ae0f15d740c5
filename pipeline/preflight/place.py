"""The nodes of a job, and which of them this process is on."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks, expand_hosts, expand_tasks


@dataclass(frozen=True)
class Place:
    """Attributes: names of the nodes in the order of their ranks, the index of this node, and the first rank of each node."""

    nodes: tuple[str, ...]
    index: int
    first_ranks: tuple[int, ...]
    world_size: int

    @property
    def node(self) -> str:
        """Name of this node."""
        return self.nodes[self.index]

    def members(self, index: int) -> range:
        """The ranks of a node."""
        ends = (*self.first_ranks[1:], self.world_size)
        return range(self.first_ranks[index], ends[index])


def find(ranks: Ranks, environment: Mapping[str, str] = os.environ) -> Place:
    """Find the nodes in the variables of srun; without it, all ranks are on this machine.

    Raises:
        UserError: the ranks are on several hosts whose names are unknown, or not in blocks of neighbors on each node.
    """
    if ranks.launcher == "srun":
        nodes = expand_hosts(environment["SLURM_STEP_NODELIST"])
        tasks = expand_tasks(environment["SLURM_STEP_TASKS_PER_NODE"])
        index = int(environment.get("SLURM_NODEID", "0"))
        place = Place(tuple(nodes), index, tuple(sum(tasks[:i]) for i in range(len(tasks))), ranks.world_size)
        if ranks.rank not in place.members(index):
            fix = "start it with srun --distribution=block"
            raise UserError.of("SLURM_DISTRIBUTION", environment.get("SLURM_DISTRIBUTION", ""), "must fill one node after the other", fix)
        return place
    if ranks.local_size != ranks.world_size:
        rule = f"has {ranks.world_size} ranks, {ranks.local_size} of them on this host, and the names of the other hosts are unknown"
        raise UserError.of("stage", "preflight", rule, "start it with srun, or with sbatch slurm/preflight.sbatch")
    return Place((socket.gethostname(),), 0, (0,), ranks.world_size)


def pairings(count: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs of neighboring nodes in a ring: each node is in two pairs, in a round in one at most.

    A node whose two pairs are slow is slow itself; one with a slow and a fast pair has a slow neighbor.

    Args:
        count: number of nodes.
    """
    if count < 2:
        return []
    rounds = [[(i, i + 1) for i in range(0, count - 1, 2)], [(i, i + 1) for i in range(1, count - 1, 2)]]
    if count > 2:
        last = (count - 1, 0)
        rounds = [*rounds, [last]] if count % 2 else [rounds[0], [*rounds[1], last]]
    return [pairs for pairs in rounds if pairs]
