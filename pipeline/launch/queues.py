"""The partition and QoS of a job: the first entry of cluster.queues whose limits fit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from pipeline.common.errors import Violation
from pipeline.common.ranks import slurm_seconds
from pipeline.config.cluster import ClusterConfig, QueueConfig

#: Value of cluster.time for the longest time of the queue.
LONGEST = "longest"


def placed(cluster: ClusterConfig, least: int, most: int, enough: str | None = None) -> ClusterConfig:
    """Return the options of a job with its partition, QoS and time; unchanged if no queue fits or none is known (`violations` says so).

    Args:
        enough: time that cluster.time=longest does not exceed.
    """
    queue = _first_fit(cluster, least, most)
    if queue is None:
        return cluster
    time = min(filter(None, (queue.max_time, enough)), key=slurm_seconds) if cluster.time == LONGEST and queue.max_time else cluster.time
    return dataclasses.replace(cluster, partition=cluster.partition or queue.partition, qos=cluster.qos or queue.qos, time=time)


def violations(cluster: ClusterConfig, least: int, most: int) -> Iterator[Violation]:
    """Yield why no queue fits a job; arguments as those of `placed`. A partition or QoS that is in no entry is left to Slurm."""
    candidates, queue = _candidates(cluster), _first_fit(cluster, least, most)
    if cluster.time == LONGEST and (not candidates or (queue is not None and queue.max_time is None)):
        yield _no_longest(cluster)
    elif candidates and queue is None:
        nodes = f"{least}-{most}" if least < most else str(most)
        wanted = "" if cluster.time == LONGEST else f" and {cluster.time}"
        limits = "; ".join(map(described, candidates))
        rule = f"fits no queue of cluster={cluster.name} with {nodes} nodes{wanted}: {limits}"
        fix = "change cluster.nodes or cluster.time, or set cluster.partition or cluster.qos to one that is not listed"
        yield Violation("cluster.nodes", nodes, rule, fix)


def _no_longest(cluster: ClusterConfig) -> Violation:
    """Why cluster.time=longest has no value."""
    chosen = [name for name in ("partition", "qos") if getattr(cluster, name)]
    known = "; ".join(map(described, cluster.queues)) or "it has none"
    rule, fix = f"needs an entry of cluster.queues with max_time: {known}", "set cluster.time=HOURS:MINUTES:SECONDS"
    if not (chosen and cluster.queues):
        return Violation("cluster.time", LONGEST, rule, fix)
    given = " and ".join(f"cluster.{name}={getattr(cluster, name)}" for name in chosen)
    return Violation("cluster.time", LONGEST, f"{rule}; none has {given}", f"correct cluster.{chosen[-1]}, or {fix}")


def too_many(jobs: Sequence[ClusterConfig]) -> Iterator[Violation]:
    """Yield the queues that accept fewer jobs of a user than are submitted at once.

    Args:
        jobs: options of each job, as `placed` returns them.
    """
    counts = Counter((job.partition, job.qos) for job in jobs)
    limits = {(queue.partition, queue.qos): queue for job in jobs for queue in job.queues if queue.max_submitted is not None}
    for place, queue in limits.items():
        if counts[place] > (queue.max_submitted or 0):
            fix = "submit fewer jobs at once, or set cluster.partition or cluster.qos"
            yield Violation("cluster.queues", described(queue), f"accepts fewer jobs of a user than these {counts[place]}", fix)


def place_of(queue: QueueConfig) -> str:
    """Return partition and QoS as text; empty for the default ones."""
    return " ".join(f"{name} {value}" for name, value in (("partition", queue.partition), ("qos", queue.qos)) if value)


def described(queue: QueueConfig) -> str:
    """Return the limits of a queue as text, such as "partition batch: 1-91 nodes, 02:00:00"."""
    most = "" if queue.max_nodes is None else f"-{queue.max_nodes}"
    limits = [f"{queue.min_nodes}{most or ' or more'} nodes", queue.max_time or "time unknown"]
    limits += [f"{queue.max_submitted} jobs"] if queue.max_submitted else []
    return f"{place_of(queue) or 'default partition'}: {', '.join(limits)}"


def _candidates(cluster: ClusterConfig) -> list[QueueConfig]:
    """The entries that agree with the partition and the QoS that the user has set."""
    return [
        queue
        for queue in cluster.queues
        if cluster.partition in (None, queue.partition) and (cluster.qos is None or cluster.qos == queue.qos)
    ]


def _first_fit(cluster: ClusterConfig, least: int, most: int) -> QueueConfig | None:
    """The first entry that fits the nodes and the time of a job."""
    return next((queue for queue in _candidates(cluster) if _fits(queue, cluster.time, least, most)), None)


def _fits(queue: QueueConfig, time: str, least: int, most: int) -> bool:
    nodes = queue.min_nodes <= least and (queue.max_nodes is None or most <= queue.max_nodes)
    return nodes and (time == LONGEST or queue.max_time is None or slurm_seconds(time) <= slurm_seconds(queue.max_time))
