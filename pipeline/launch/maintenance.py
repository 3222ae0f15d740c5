"""Maintenance that begins before a job could end: Slurm starts such a job only after it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from pipeline.common.ranks import slurm_seconds
from pipeline.config.cluster import ClusterConfig
from pipeline.launch import job_times, slurm


def notice(cluster: ClusterConfig) -> tuple[str, str] | None:
    """Return what a job that is submitted now waits for, with a fix; None if no maintenance begins in its time, or other nodes suffice."""
    now, fewest = time.time(), cluster.min_nodes or cluster.nodes + cluster.spares
    for begin, end, nodes, name in sorted(_windows(cluster)):
        left = begin - now
        if now >= end or left >= slurm_seconds(cluster.time):
            continue
        others = [node for node, is_usable in slurm.usable(cluster.partition or "").items() if is_usable and node not in nodes]
        if nodes and len(others) >= fewest:
            continue
        begins, ends = (time.strftime("%Y-%m-%d %H:%M", time.localtime(moment)) for moment in (begin, end))
        what = f"maintenance {name} {'has begun' if left < 0 else f'begins at {begins}'}{f', until {ends}' if end > begin else ''}"
        fits = job_times.shown(left // 60 * 60)
        fix = f"the longest time that still fits is cluster.time={fits}" if left >= 120 else "no shorter time helps"
        return f"{what}: a job of {cluster.time} starts after it", fix
    return None


def _windows(cluster: ClusterConfig) -> Iterator[tuple[float, float, list[str], str]]:
    """Yield begin, end, nodes (empty: all) and name of each maintenance: Slurm's reservations, and cluster.maintenance."""
    try:
        printed = slurm.command(["scontrol", "show", "reservation", "--oneliner"], timeout=15)
    except slurm.SlurmError:
        printed = ""
    for fields in map(slurm.parse_facts, printed.splitlines()):
        begin, end = (slurm.seconds_of(fields.get(name, "")) for name in ("StartTime", "EndTime"))
        if "MAINT" in re.split(r"\W", fields.get("Flags", "")) and begin is not None and end is not None:
            yield begin, end, slurm.hosts(fields.get("Nodes", "")), fields.get("ReservationName", "")
    if cluster.maintenance and (begin := slurm.seconds_of(cluster.maintenance)) is not None and begin > time.time():
        yield begin, begin, [], f"of cluster={cluster.name}"
