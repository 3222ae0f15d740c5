"""The nodes of a job, which of them this process is on, and the host names that it resolves: each name is resolved by several nodes."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks, expand_hosts, expand_tasks

#: Nodes after its own whose names a node resolves. All names on all nodes would be a million requests for 1,024 nodes.
NEIGHBORS = 2


def bounded(calls: Mapping[str, Callable[[], Any]], seconds: float, otherwise: Any) -> dict[str, Any]:
    """Run calls at once, each in a thread of its own; name -> result, or `otherwise` for one that takes longer.

    The thread of such a call goes on, and does not keep the process from ending. A call that raises must not be passed.
    """
    results: dict[str, Any] = {}

    def run(name: str, call: Callable[[], Any]) -> None:
        results[name] = call()

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in calls.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {name: results.get(name, otherwise) for name in calls}


def to_resolve(nodes: Sequence[str], index: int, suffix: str) -> list[str]:
    """The names that a node resolves: the first node's, its own and those of its successors, with cluster.host_suffix.

    Args:
        nodes: of the job, in the order of their ranks.
    """
    following = [nodes[(index + step) % len(nodes)] for step in range(NEIGHBORS + 1)]
    return list(dict.fromkeys(f"{name}{suffix}" for name in (nodes[0], *following)))


def resolve(names: Sequence[str], seconds: float) -> dict[str, str | None]:
    """Resolve names, all at once; name -> None, or what failed."""

    def failure(name: str) -> str | None:
        try:
            socket.getaddrinfo(name, None)
        except OSError as error:
            return error.strerror or str(error)
        return None

    return bounded({name: partial(failure, name) for name in names}, seconds, f"no answer within {seconds:.0f} s")


@dataclass(frozen=True)
class NodePlace:
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


def find(ranks: Ranks, environment: Mapping[str, str] = os.environ) -> NodePlace:
    """Find the nodes in the variables of srun; without it, all ranks are on this machine.

    Raises:
        UserError: the ranks are on several hosts whose names are unknown, or not in blocks of neighbors on each node.
    """
    if ranks.launcher == "srun":
        nodes = expand_hosts(environment["SLURM_STEP_NODELIST"])
        tasks = expand_tasks(environment["SLURM_STEP_TASKS_PER_NODE"])
        index = int(environment.get("SLURM_NODEID", "0"))
        place = NodePlace(tuple(nodes), index, tuple(sum(tasks[:i]) for i in range(len(tasks))), ranks.world_size)
        if ranks.rank not in place.members(index):
            fix = "start it with srun --distribution=block"
            raise UserError.of("SLURM_DISTRIBUTION", environment.get("SLURM_DISTRIBUTION", ""), "must fill one node after the other", fix)
        return place
    if ranks.local_size != ranks.world_size:
        rule = f"has {ranks.world_size} ranks, {ranks.local_size} of them on this host, and the names of the other hosts are unknown"
        raise UserError.of("stage", "preflight", rule, "start it with srun, or with sbatch slurm/preflight.sbatch")
    return NodePlace((socket.gethostname(),), 0, (0,), ranks.world_size)


def pairings(count: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs of neighboring nodes in a ring: each node is in two pairs, in a round in one at most.

    A node whose two pairs are slow is slow itself; one with a slow and a fast pair has a slow neighbor.
    """
    if count < 2:
        return []
    rounds = [[(i, i + 1) for i in range(0, count - 1, 2)], [(i, i + 1) for i in range(1, count - 1, 2)]]
    if count > 2:
        last = (count - 1, 0)
        rounds = [*rounds, [last]] if count % 2 else [rounds[0], [*rounds[1], last]]
    return [pairs for pairs in rounds if pairs]
