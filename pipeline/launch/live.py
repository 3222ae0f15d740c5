"""The limits of cluster.queues that Slurm itself tells, and the sbatch command that stage=plan and a dry run print with them."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.common.ranks import is_slurm_limit, slurm_seconds
from pipeline.config import hardware
from pipeline.config.cluster import ClusterConfig, QueueConfig
from pipeline.config.paths import batch_scripts
from pipeline.config.schema import RunConfig
from pipeline.launch import job, queues, site, slurm

log = logging.getLogger("pipeline")

#: Longest time that a submission waits for an answer, seconds.
TIMEOUT = 15.0
#: Fields of `sacctmgr show qos`, in the order of Limits.
_QOS_FIELDS = "Name,MaxWall,MaxSubmitJobsPerUser,MaxJobsPerUser"


#: Limits of a partition or of a QoS that are set, by the fields of QueueConfig.
Limits = dict[str, Any]


def parse_partitions(printed: str) -> dict[str, Limits]:
    """Return the limits by partition from `scontrol show partition --oneliner`; no job has more nodes than the partition."""
    limits = {}
    for line in printed.splitlines():
        fields = slurm.parse_facts(line)
        if name := fields.get("PartitionName"):
            most = _number(fields.get("MaxNodes")) or _number(fields.get("TotalNodes"))
            limits[name] = _limits(max_time=_time(fields.get("MaxTime", "")), min_nodes=_number(fields.get("MinNodes")), max_nodes=most)
    return limits


def parse_qos(printed: str) -> dict[str, Limits]:
    """Return the limits by QoS from `sacctmgr --noheader --parsable2 show qos format=...`."""
    rows = [line.split("|") for line in printed.splitlines() if line.count("|") == _QOS_FIELDS.count(",")]
    return {
        name: _limits(max_time=_time(time), max_submitted=_number(submitted), max_running=_number(running))
        for name, time, submitted, running in rows
    }


def _limits(**limits: str | int | None) -> Limits:
    return {name: value for name, value in limits.items() if value is not None}


def with_limits(cluster: ClusterConfig, partitions: Mapping[str, Limits], qos: Mapping[str, Limits]) -> tuple[ClusterConfig, list[str]]:
    """Return the options of a cluster with the limits that Slurm tells, and a line for each difference.

    Several entries of one partition divide its limits by nodes or by QoS: there the limits of the partition are upper bounds.
    """
    entries = Counter(queue.partition for queue in cluster.queues)
    queues, differences = [], []
    for queue in cluster.queues:
        partition, of_qos = partitions.get(queue.partition or "", {}), qos.get(queue.qos or "", {})
        alone = entries[queue.partition] == 1 and queue.qos is None
        live = _replaced(_replaced(queue, partition, only_lower=not alone), of_qos)
        differences += _differences(queue, live, cluster.name)
        queues.append(live)
    return dataclasses.replace(cluster, queues=queues), differences


def corrected(cluster: ClusterConfig) -> ClusterConfig:
    """Return the options of a cluster with the limits that Slurm tells on this machine, and log each difference once.

    A Slurm that lacks one of its partitions is that of another machine, whose limits are not used.
    """
    if not cluster.queues:
        return cluster
    partitions, qos = asked()
    other = {queue.partition for queue in cluster.queues if queue.partition} - set(partitions)
    if partitions and other:
        _warn(f"the Slurm here has no partition {', '.join(sorted(other))}: its limits are not those of cluster={cluster.name}")
        return cluster
    changed, differences = with_limits(cluster, partitions, qos)
    for text in differences:
        _warn(text)
    return changed


@functools.cache
def asked() -> tuple[dict[str, Limits], dict[str, Limits]]:
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


def node(cluster: ClusterConfig) -> dict[str, str]:
    """Return the fields of a node of a cluster's partition, or else of one with GPUs or of the default one; SlurmError: no answer."""
    rows = [line.split("|") for line in slurm.command(["sinfo", "--noheader", "--format=%P|%N|%G"], timeout=TIMEOUT).splitlines()]
    name = cluster.partition or next((queue.partition for queue in cluster.queues), None)
    rows = sorted((row for row in rows if name in (None, row[0].rstrip("*"))), key=lambda row: ("gpu" not in row[2], "*" not in row[0]))
    nodes = slurm.hosts(rows[0][1]) if rows else []
    return slurm.parse_facts(slurm.command(["scontrol", "show", "node", "--oneliner", nodes[0]], timeout=TIMEOUT)) if nodes else {}


def gpus(fields: Mapping[str, str]) -> int:
    """Return the number of GPUs of a node from its fields, such as Gres=gpu:a100:4(S:0-1)."""
    return sum(map(int, re.findall(r"\bgpu(?::[^:,(]+)?:(\d+)", fields.get("Gres", ""))))


def lacking(cluster: ClusterConfig, name: str, fields: Mapping[str, str]) -> list[str]:
    """Return what the file of a cluster lacks, as its lines, by its name in Slurm and the fields of a node."""
    number, cores, default = gpus(fields), int(fields.get("CPUEfctv") or fields.get("CPUTot") or 0), ClusterConfig()
    limits = [{"partition": name} | limit for name, limit in asked()[0].items() if cluster.partition in (None, name)]
    entries = {"name": name, "queues": json.dumps(limits), "gpus_per_node": number, "tasks_per_node": number, "cores": cores}
    entries |= {
        "cpus_per_task": cores // number if number else 0,
        "memory": f"{fields['RealMemory']}M" if "RealMemory" in fields else None,
        "architecture": fields.get("Arch"),
    }
    return [f"{key}: {value}" for key, value in entries.items() if value and getattr(cluster, key) == getattr(default, key)]


@functools.cache
def _warn(text: str) -> None:
    log.warning("%s", text)


def _replaced(queue: QueueConfig, limits: Limits, *, only_lower: bool = False) -> QueueConfig:
    """The entry with the limits that are known; with only_lower, those that are tighter than its own."""
    values = {name: value for name, value in limits.items() if not only_lower or _is_tighter(name, value, getattr(queue, name))}
    if "max_time" in values and queue.max_time is not None and slurm_seconds(values["max_time"]) == slurm_seconds(queue.max_time):
        del values["max_time"]  # 1-00:00:00 and 24:00:00 are the same
    return dataclasses.replace(queue, **values)


def _is_tighter(name: str, live: str | int, written: str | int | None) -> bool:
    if written is None:
        return True
    if isinstance(live, str) or isinstance(written, str):
        return slurm_seconds(str(live)) < slurm_seconds(str(written))
    return live > written if name == "min_nodes" else live < written


def _differences(written: QueueConfig, live: QueueConfig, cluster: str) -> list[str]:
    """A line for each limit that the file has with another value."""
    names = ("min_nodes", "max_nodes", "max_time", "max_submitted", "max_running")
    values = {name: (getattr(written, name), getattr(live, name)) for name in names}
    return [
        f"{queues.place_of(written)}: {name} is {now} in Slurm, and {before} in cluster={cluster}; that of Slurm is used"
        for name, (before, now) in values.items()
        if before is not None and before != now
    ]


def _time(text: str) -> str | None:
    return text if is_slurm_limit(text) and text != "UNLIMITED" else None


def _number(text: str | None) -> int | None:
    """A number of nodes or jobs above 0; Slurm prints 0 or UNLIMITED where there is no limit."""
    return int(text) if text and text.isdecimal() and int(text) > 0 else None


def lines(config: RunConfig, world_size: int, arguments: Sequence[str], *, has_weights: bool) -> Iterator[str]:
    """Yield the command, and a line for everything that it lacks.

    Args:
        arguments: of `python -m pipeline`, for this job.
        has_weights: whether the job has a checkpoint to start from.
    """
    cluster = corrected(config.cluster)
    if cluster.tasks_per_node == 1 and world_size != cluster.nodes:
        yield f"choose cluster=NAME, or set cluster.tasks_per_node to the GPUs of a node{_known(cluster)}, for the sbatch line"
        return
    nodes = -(-world_size // cluster.tasks_per_node)
    if misfit := list(queues.violations(cluster, *job.node_range(cluster, config.stage.name, nodes))):
        yield from (f"{violation.key}={violation.value}: {violation.rule}: {violation.fix}" for violation in misfit)
        return
    yield job.sbatch_line(cluster, config.stage.name, world_size, arguments, batch_scripts(Path.cwd()))
    for key in job.missing(cluster):
        yield f"  cluster.{key} is not set, and cluster={cluster.name} requires it: add cluster.{key}=NAME, or --{key}=NAME to this line"
    if (config.stage.name == "finetune" or config.lora.rank) and not has_weights:
        yield "  checkpoint.initialize_from is not set: add the run directory or checkpoint with the weights of this model"
    yield from _gpus(cluster)
    if text := site.other_architecture(cluster):
        yield f"  {text}"


def _gpus(cluster: ClusterConfig) -> Iterator[str]:
    """Yield what is wrong with the GPUs of a job: each rank has one."""
    ranks, gpus = cluster.tasks_per_node, cluster.gpus_per_node
    alone = "; on a node that jobs share, one rank asks for its part: cluster.gpus_per_node=1 cluster.memory=NUMBER" if ranks == 1 else ""
    requested = any(option.startswith(("--gpus", "--gres", "-G", "--exclusive")) for option in cluster.sbatch)
    if gpus and gpus != ranks:
        text = f"  cluster.gpus_per_node={gpus} and cluster.tasks_per_node={ranks} differ, and each rank has one GPU: set both to the same"
        yield f"{text}{alone}"
    elif cluster.hardware and not gpus and not requested:
        yield f"  no GPUs are requested: add cluster.gpus_per_node={ranks}, unless the partition gives whole nodes"
    elif cluster.hardware and ranks == 1 < hardware.load(cluster.hardware).gpus_per_node:
        yield f"  one rank a node: set cluster.tasks_per_node to the GPUs of a node{_known(cluster)}{alone}"


def _known(cluster: ClusterConfig) -> str:
    """The GPUs of a node that the file of the hardware has, as a remark."""
    return f" ({hardware.load(cluster.hardware).gpus_per_node} in conf/hardware/{cluster.hardware}.yaml)" if cluster.hardware else ""
