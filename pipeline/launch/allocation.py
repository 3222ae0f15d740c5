"""The nodes of a job: which of them can run ranks, how many ranks each has, and on which of them, and in which layout, the ranks start."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.common.atomic_files import atomic_file
from pipeline.config import layouts
from pipeline.config.schema import RunConfig
from pipeline.launch import moldable, slurm
from pipeline.launch.moldable import Shape

log = logging.getLogger("pipeline")

#: Nodes on which the run failed, in the run directory: name -> {reason, time}.
EXCLUDED = "excluded_nodes.json"
#: Seconds after which a node is tried again.
_EXCLUDED_FOR = 24 * 3600.0


@dataclass(frozen=True)
class Allocation:
    """What Slurm has granted.

    Attributes:
        job: id of the job.
        restarts: how often Slurm has put it back into the queue.
        nodes: all nodes, in Slurm's order; the first one runs this process.
        tasks_per_node: ranks of a node; None where the nodes have different numbers of ranks.
        sized: whether the job has these ranks as its tasks. A range of nodes has none, and a resized job has the old ones.
    """

    job: str
    restarts: int
    nodes: tuple[str, ...]
    tasks_per_node: int | None
    sized: bool = True

    @staticmethod
    def of(environment: Mapping[str, str]) -> Allocation:
        """Read the variables of a batch job."""
        tasks = re.fullmatch(r"(\d+)(\(x\d+\))?", environment.get("SLURM_TASKS_PER_NODE", ""))
        return Allocation(
            environment["SLURM_JOB_ID"],
            int(environment.get("SLURM_RESTART_COUNT") or 0),
            tuple(slurm.hosts(environment.get("SLURM_JOB_NODELIST", ""))),
            int(tasks[1]) if tasks else None,
        )

    def step_options(self, nodes: Sequence[str], *, again: bool) -> list[str]:
        """Return the srun options that start the ranks on some of the nodes.

        Args:
            nodes: in Slurm's order.
            again: whether an earlier step may still hold resources of the job, as that of a lost node does.
        """
        if not again and self.sized and list(nodes) == list(self.nodes):
            return []
        options = [f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}"]
        if self.tasks_per_node is not None:
            options += [f"--ntasks={len(nodes) * self.tasks_per_node}", f"--ntasks-per-node={self.tasks_per_node}"]
        return [*options, "--overlap", "--mem=0"] if again else options


def exclude(run_dir: Path, nodes: Iterable[str], reason: str) -> None:
    """Note nodes on which the run shall not continue."""
    known = _noted(run_dir) | {node: {"reason": reason, "time": time.time()} for node in nodes}
    with atomic_file(run_dir / EXCLUDED, "w") as handle:
        json.dump(known, handle, indent=1)


def excluded(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return the nodes that were noted in the last 24 hours, with the reason."""
    return {node: entry for node, entry in _noted(run_dir).items() if time.time() - entry["time"] < _EXCLUDED_FOR}


def excluded_in_queue(run_dir: Path, fields: Mapping[str, str], fewest: int) -> list[str]:
    """Return the nodes that the next job of a run shall not get: those that its user excluded, and those on which the run failed.

    `fields` are those of this job (slurm.facts). With fewer than `fewest` other nodes that work, only those of the user are excluded.
    """
    of_user = set(slurm.hosts(fields.get("ExcNodeList", ""))) - _noted(run_dir).keys()
    failed = excluded(run_dir).keys()
    nodes = slurm.usable(fields.get("Partition", "")) if failed else {}
    left = [node for node, works in nodes.items() if works and node not in {*of_user, *failed}]
    if nodes and len(left) < fewest:
        log.warning("without %s, %d nodes can run the job, and it needs %d: none is excluded", ", ".join(failed), len(left), fewest)
        return sorted(of_user)
    return sorted(of_user | failed)


def _noted(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The nodes that were ever noted; empty for a damaged file."""
    try:
        known = json.loads((run_dir / EXCLUDED).read_text(encoding="utf-8"))
        return {node: entry for node, entry in known.items() if isinstance(entry["time"], int | float)}
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}


class Placement:
    """The nodes of one job.

    Args:
        arguments: of `python -m pipeline`.
        config: what they compose; None if they do not.
        granted: what Slurm has granted.

    Attributes:
        granted: the same, with the ranks of a node that a range of nodes has.
        bad: nodes that the ranks shall not use -> reason.
    """

    def __init__(self, arguments: Sequence[str], config: RunConfig | None, granted: Allocation) -> None:
        self._arguments, self._config = tuple(arguments), config
        self._is_moldable = config is not None and moldable.follows_nodes(config)
        if config is not None and self._is_moldable:
            granted = replace(granted, tasks_per_node=moldable.tasks_per_node(config.cluster, os.environ), sized=False)
        self.granted = granted
        self.bad: dict[str, str] = {}

    def exclude(self, nodes: Iterable[str], reason: str) -> None:
        """Leave out nodes of this job."""
        for node in set(nodes) & set(self.granted.nodes):
            self.bad.setdefault(node, reason)

    def good(self, without: Iterable[str] = ()) -> list[str]:
        """Return the nodes that are not bad, in Slurm's order.

        Args:
            without: further nodes to leave out.
        """
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
