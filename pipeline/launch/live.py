"""The limits of cluster.queues that Slurm itself tells: they replace those of the file of the site, and a difference is printed once."""

from __future__ import annotations

import dataclasses
import functools
import logging
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.common.slurm_time import is_limit, seconds
from pipeline.config.cluster import ClusterConfig, QueueConfig
from pipeline.launch import slurm

log = logging.getLogger("pipeline")

#: Longest time that a submission waits for an answer, seconds.
TIMEOUT = 15.0
#: Fields of `sacctmgr show qos`, in the order of Limits.
_QOS_FIELDS = "Name,MaxWall,MaxSubmitJobsPerUser,MaxJobsPerUser"


@dataclass(frozen=True)
class Limits:
    """Limits of a partition or of a QoS; None for one that is not set."""

    max_time: str | None = None
    min_nodes: int | None = None
    max_nodes: int | None = None
    max_submitted: int | None = None
    max_running: int | None = None


def parse_partitions(printed: str) -> dict[str, Limits]:
    """Return the limits by partition from `scontrol show partition --oneliner`; no job has more nodes than the partition."""
    found = {}
    for line in printed.splitlines():
        fields = slurm.parse_facts(line)
        if name := fields.get("PartitionName"):
            most = _number(fields.get("MaxNodes")) or _number(fields.get("TotalNodes"))
            found[name] = Limits(_time(fields.get("MaxTime", "")), _number(fields.get("MinNodes")), most)
    return found


def parse_qos(printed: str) -> dict[str, Limits]:
    """Return the limits by QoS from `sacctmgr --noheader --parsable2 show qos format=...`."""
    rows = [line.split("|") for line in printed.splitlines() if line.count("|") == _QOS_FIELDS.count(",")]
    return {
        name: Limits(_time(time), max_submitted=_number(submitted), max_running=_number(running)) for name, time, submitted, running in rows
    }


def with_limits(cluster: ClusterConfig, partitions: Mapping[str, Limits], qos: Mapping[str, Limits]) -> tuple[ClusterConfig, list[str]]:
    """Return the options of a cluster with the limits that Slurm tells, and a line for each difference.

    Several entries of one partition divide its limits by nodes or by QoS: there the limits of the partition are upper bounds.

    Args:
        cluster: as configured.
        partitions: from parse_partitions.
        qos: from parse_qos.
    """
    entries = Counter(queue.partition for queue in cluster.queues)
    queues, differences = [], []
    for queue in cluster.queues:
        partition, own = partitions.get(queue.partition or "", Limits()), qos.get(queue.qos or "", Limits())
        alone = entries[queue.partition] == 1 and queue.qos is None
        live = _replaced(_replaced(queue, partition, only_lower=not alone), own)
        differences += _differences(queue, live, cluster.name)
        queues.append(live)
    return dataclasses.replace(cluster, queues=queues), differences


def corrected(cluster: ClusterConfig) -> ClusterConfig:
    """Return the options of a cluster with the limits that Slurm tells on this machine, and log each difference once.

    A Slurm that lacks one of its partitions is that of another machine, whose limits are not used.
    """
    if not cluster.queues:
        return cluster
    partitions, qos = _asked()
    other = {queue.partition for queue in cluster.queues if queue.partition} - set(partitions)
    if partitions and other:
        _warn(f"the Slurm here has no partition {', '.join(sorted(other))}: its limits are not those of cluster={cluster.name}")
        return cluster
    changed, differences = with_limits(cluster, partitions, qos)
    for text in differences:
        _warn(text)
    return changed


@functools.cache
def _asked() -> tuple[dict[str, Limits], dict[str, Limits]]:
    """The limits of partitions and QoS; empty where Slurm is not installed or does not answer."""
    commands = {
        "scontrol": ["scontrol", "--all", "show", "partition", "--oneliner"],
        "sacctmgr": ["sacctmgr", "--noheader", "--parsable2", "show", "qos", f"format={_QOS_FIELDS}"],
    }
    printed = {}
    for name, words in commands.items():
        try:
            printed[name] = slurm.command(words, timeout=TIMEOUT) if shutil.which(name) else ""
        except slurm.SlurmError as error:
            log.debug("the limits of cluster.queues are not compared: %s", error)
            printed[name] = ""
    return parse_partitions(printed["scontrol"]), parse_qos(printed["sacctmgr"])


@functools.cache
def _warn(text: str) -> None:
    """Log a line, once in this process."""
    log.warning("%s", text)


def _replaced(queue: QueueConfig, limits: Limits, *, only_lower: bool = False) -> QueueConfig:
    """The entry with the limits that are known; with only_lower, those that are tighter than its own."""
    values = {name: value for name, value in dataclasses.asdict(limits).items() if value is not None}
    if only_lower:
        values = {name: value for name, value in values.items() if _is_tighter(name, value, getattr(queue, name))}
    if "max_time" in values and queue.max_time is not None and seconds(values["max_time"]) == seconds(queue.max_time):
        del values["max_time"]  # 1-00:00:00 and 24:00:00 are the same
    return dataclasses.replace(queue, **values)


def _is_tighter(name: str, live: str | int, written: str | int | None) -> bool:
    """Whether a live limit allows less than the one in the file."""
    if written is None:
        return True
    if isinstance(live, str) or isinstance(written, str):
        return seconds(str(live)) < seconds(str(written))
    return live > written if name == "min_nodes" else live < written


def _differences(written: QueueConfig, live: QueueConfig, cluster: str) -> list[str]:
    """A line for each limit that the file has with another value."""
    place = " ".join(f"{kind} {name}" for kind, name in (("partition", written.partition), ("qos", written.qos)) if name)
    values = {name: (getattr(written, name), getattr(live, name)) for name in ("min_nodes", "max_nodes", "max_time", "max_submitted")}
    values["max_running"] = (written.max_running, live.max_running)
    return [
        f"{place}: {name} is {now} in Slurm, and {before} in cluster={cluster}; that of Slurm is used"
        for name, (before, now) in values.items()
        if before is not None and before != now
    ]


def _time(text: str) -> str | None:
    """A finite time limit."""
    return text if is_limit(text) and text != "UNLIMITED" else None


def _number(text: str | None) -> int | None:
    """A number of nodes or jobs above 0; Slurm prints 0 or UNLIMITED where there is no limit."""
    return int(text) if text and text.isdecimal() and int(text) > 0 else None
