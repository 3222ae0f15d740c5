"""The nodes of a job: which of them can run ranks, and how many ranks each has. Loads no configuration: the deputy starts with it."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common import events
from pipeline.common.atomic_files import atomic_file
from pipeline.launch import slurm

log = logging.getLogger("pipeline")

#: Nodes on which the run failed, in the run directory: name -> {reason, time}.
EXCLUDED = "excluded_nodes.json"
#: Seconds after which a node is tried again.
_EXCLUDED_FOR = 24 * 3600.0


@dataclass(frozen=True)
class Allocation:
    """What Slurm has granted.

    Attributes:
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


def next_job(run_dir: Path, job: str) -> str | None:
    """Return the next job of a chain that a job has submitted; None if it has none."""
    known = [event.get("next") for event in events.read(run_dir) if event["event"] == "chain" and event.get("job") == job]
    return known[-1] if known else None


def exclude(run_dir: Path, nodes: Collection[str], reason: str) -> None:
    """Note nodes on which the run shall not continue."""
    known = _noted(run_dir) | {node: {"reason": reason, "time": time.time()} for node in nodes}
    with atomic_file(run_dir / EXCLUDED, "w") as handle:
        json.dump(known, handle, indent=1)
    events.record(run_dir, "exclude", nodes=sorted(nodes), reason=reason)


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
