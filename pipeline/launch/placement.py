"""On which nodes of a job, and in which layout, the ranks start."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pipeline.config import layouts
from pipeline.config.schema import RunConfig
from pipeline.launch import moldable, slurm
from pipeline.launch.allocation import Allocation
from pipeline.launch.moldable import Shape

log = logging.getLogger("pipeline")


class Placement:
    """The nodes of one job.

    Args:
        config: what they compose; None if they do not.

    Attributes:
        granted: the same, with the ranks of a node that a range of nodes has.
        bad: nodes that the ranks shall not use -> reason.
    """

    def __init__(self, arguments: Sequence[str], config: RunConfig | None, granted: Allocation) -> None:
        self._arguments, self._config = tuple(arguments), config
        self._is_moldable = config is not None and moldable.follows_nodes(config)
        if config is not None and self._is_moldable:
            given = os.environ.get("SLURM_NTASKS_PER_NODE", "")  # a range of nodes has none
            tasks = int(given) if given.isdecimal() else config.cluster.tasks_per_node
            granted = replace(granted, tasks_per_node=tasks, sized=False)
        self.granted = granted
        self.bad: dict[str, str] = {}

    def exclude(self, nodes: Iterable[str], reason: str) -> None:
        """Leave out nodes of this job."""
        for node in set(nodes) & set(self.granted.nodes):
            self.bad.setdefault(node, reason)

    def good(self, without: Iterable[str] = ()) -> list[str]:
        """Return the nodes that are not bad, in Slurm's order."""
        return [node for node in self.granted.nodes if node not in {*self.bad, *without}]

    def shape(self) -> tuple[list[str], Shape]:
        """Return the nodes of the ranks, and their arguments: with the layout that is chosen for these nodes.

        Raises:
            UserError: no layout is legal on them.
        """
        nodes = self._nodes()
        if self._config is None or not self._is_moldable:
            return nodes, Shape(len(nodes), self._arguments, "")
        shape = moldable.choose(self._config, self._arguments, len(nodes), tasks_per_node=self.granted.tasks_per_node)
        unused = f", and {len(nodes) - shape.nodes} without work" if shape.nodes < len(nodes) else ""
        log.info("%d nodes%s: %s", shape.nodes, unused, shape.layout)
        return nodes[: shape.nodes], shape

    def fewest(self, nodes: int) -> int:
        """Return the fewest nodes on which ranks that had so many can start again."""
        if self._config is None:
            return nodes
        return moldable.fewest(self._config, self._arguments, nodes, tasks_per_node=self.granted.tasks_per_node)

    def most(self) -> int:
        """Return the number of nodes without the spares."""
        return max(len(self.granted.nodes) - (0 if self._config is None else self._config.cluster.spares), 1)

    def next_phase(self, before: int, step: int) -> int | None:
        """Return the nodes of the phase that begins with the newest checkpoint, None if the ranks had as many.

        Args:
            before: step of the checkpoint with which the ranks began.
            step: that of the newest one, -1 for none.
        """
        if self._config is None or step < 0:
            return None
        nodes = layouts.nodes_of_phase(self._config, step)
        return None if nodes == layouts.nodes_of_phase(self._config, max(before, 0)) else nodes

    def asked(self) -> tuple[int, int]:
        """Return the fewest and the most nodes that a job asks for which waits to continue the run."""
        if self._config is None or not (self._config.cluster.min_nodes or layouts.has_phases(self._config.training)):
            return len(self.granted.nodes), len(self.granted.nodes)
        cluster = moldable.cluster_at(self._config)
        return (cluster.min_nodes or cluster.nodes) + cluster.spares, cluster.nodes + cluster.spares

    def resize(self, job: str) -> None:
        """Ask for the nodes of the phase in which a waiting job continues the run."""
        if self._config is not None and layouts.has_phases(self._config.training):
            slurm.resize(job, *self.asked(), self.granted.tasks_per_node)

    def lost(self, nodes: Sequence[str]) -> tuple[str, ...]:
        """Return the nodes that do not answer, of those that the ranks had and of the spares; none if that of this process does not."""
        here, *others = (node for node in self.granted.nodes if node in {self.granted.nodes[0], *nodes, *self.good()})
        answering = slurm.answering([here, *others]) if others else set()
        if others and here not in answering:
            log.warning("no node answers, not even this one: Slurm starts no steps, and no node counts as lost")
        return tuple(sorted(set(others) - answering)) if here in answering else ()

    def _nodes(self) -> list[str]:
        """The nodes on which the ranks may run: the first good ones, as many as the job has without its spares."""
        if self._config is None:
            return list(self.granted.nodes)
        if self.bad or self._config.cluster.spares:
            self.exclude((node for node, works in slurm.usable().items() if not works), "Slurm calls it down")
        good, least = self.good(), self.fewest(self.most())
        if len(good) < least:  # a node that failed in an earlier job is better than none
            good += [node for node in self.granted.nodes if node in self.bad][: least - len(good)]
        return sorted(good[: self.most()], key=self.granted.nodes.index)
