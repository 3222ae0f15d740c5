"""Where the node-hours of a run went: every second of every job in one bucket, and what was lost with its cause."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pipeline.common import metrics_file
from pipeline.report.run import Run
from pipeline.report.starts import Start

#: training: steps that count. saving: steps wait for a checkpoint; from the last step to the end of rank 0. loading: weights are read.
#: start-up: the rest before the first step; from the end of rank 0 to that of all ranks. waiting: nodes of a job without ranks, as in the
#: preflight, between two starts, and spares. lost: steps that were made again, and the rest of a start that failed. unknown: no record.
BUCKETS = ("training", "validation", "saving", "loading", "start-up", "waiting", "lost", "unknown")
_SPIKE = "loss spikes"
#: Why a node is blamed, besides the reasons to leave it out.
FIRST = "did not answer, or failed first"

#: Bucket, cause of what is lost, and whether it is steps that were made again.
Key = tuple[str, str, bool]
#: Name -> (step, value).
Columns = Mapping[str, Sequence[tuple[int, float]]]
K = TypeVar("K", bound=Hashable)


@dataclass
class Account:
    """Node-seconds of a run, or of several.

    Attributes:
        seconds: by bucket and cause; their sum is the time of the jobs, and of starts outside of Slurm.
        starts: by bucket and cause, number of starts that had it.
        jobs: of each Slurm job.
        blamed: by node and reason, how often it was left out, did not answer or failed first.
    """

    seconds: dict[Key, float] = field(default_factory=dict)
    starts: dict[tuple[str, str], float] = field(default_factory=dict)
    jobs: dict[str, float] = field(default_factory=dict)
    blamed: dict[tuple[str, str], float] = field(default_factory=dict)

    def hours(self) -> dict[str, Any]:
        """Node-hours, and those of each bucket."""
        buckets = dict.fromkeys(BUCKETS, 0.0)
        for (bucket, _, _), seconds in self.seconds.items():
            buckets[bucket] += seconds / 3600
        return {"node_hours": sum(buckets.values()), "buckets": buckets}

    def add(self, other: Account) -> None:
        """Add another one."""
        for name in ("seconds", "starts", "jobs", "blamed"):
            add(getattr(self, name), getattr(other, name))


def add(sums: dict[K, float], more: Mapping[K, float]) -> None:
    """Add numbers by name."""
    for name, value in more.items():
        sums[name] = sums.get(name, 0) + value


def account_of(run: Run, columns: Columns, until: float, since: float = -math.inf) -> Account:
    """Account for the jobs of a run that ended after a time, or still run: each of them as a whole.

    Args:
        columns: of metrics.jsonl.
        until: end of what has not ended yet, seconds since 1970.
        since: seconds since 1970.
    """
    account, last, again = Account(), math.inf, list[tuple[float, str]]()
    jobs = [job for job in run.life.jobs if (until if job.end is None else job.end) > since]
    for job in jobs:
        add(account.jobs, {job.id: job.node_seconds(until)})
    waiting = sum(account.jobs.values())
    for start in reversed(run.starts):
        spent, nodes = _spent(start, until, last, columns, again), max(len(start.nodes), 1)
        if start.job in jobs if start.job is not None else (until if start.end is None else start.end) > since:
            add(account.seconds, {key: nodes * seconds for key, seconds in spent.items()})
            add(account.starts, dict.fromkeys({(bucket, cause) for bucket, cause, _ in spent}, 1))
            add(account.blamed, {(node, FIRST): 1 for node in (start.blamed if start.failed else ())})
            waiting -= nodes * sum(spent.values()) if start.job is not None else 0.0
        again += [(start.abandoned, start.cause or "unknown")]
        last = min(last, start.step)
    add(account.seconds, {("waiting", "", False): waiting} if abs(waiting) > 1e-3 else {})
    for time, node, reason in run.life.excluded:
        add(account.blamed, {(node, f"left out: {reason}"): 1} if time > since else {})
    return account


def _spent(start: Start, until: float, last: float, columns: Columns, again: list[tuple[float, str]]) -> dict[Key, float]:
    """Give each second of a start to a bucket.

    Args:
        until: its end if none is recorded, seconds since 1970.
        last: its last step that counts; infinity for the last start, which may know it.
        columns: of metrics.jsonl.
        again: seconds of steps that later starts made again, and why; what fits in this start is taken away.
    """
    end = until if start.end is None else start.end
    left, spent = max(end - start.begin, 0.0), dict[Key, float]()

    def take(seconds: float, bucket: str, cause: str = "", *, again: bool = False) -> float:
        nonlocal left
        taken = min(max(seconds, 0.0), left)
        left -= taken
        add(spent, {(bucket, cause, again): taken} if taken or bucket == "training" else {})
        return taken

    cause = start.reason or ("unknown" if start.code is None else f"exit code {start.code}")
    ended = start.end is not None and start.left is not None
    if start.ready is not None:
        take(start.loading, "loading")
        take((start.stepping or start.ready) - start.begin - start.loading, "start-up")
    elif not start.failed:
        take(left, "start-up")
    if start.ready is None and start.failed:
        columns = {}  # what the file has behind its checkpoint are steps of the start before
    if ended and not start.failed:
        take(end - (start.left or end), "start-up")
    known = start.end_step if last == math.inf and start.end is not None and start.end_step is not None else last
    for bucket, name in zip(("training", "validation", "saving"), metrics_file.SECONDS, strict=True):
        points = columns.get(name, ())
        first, middle, final = (bisect_right(points, (step, math.inf)) for step in (start.step, known, last))
        take(sum(value for _, value in points[first:middle]), bucket)
        take(sum(value for _, value in points[max(first, middle) : final]), "lost", cause, again=True)
    take(start.rewound, "lost", _SPIKE, again=True)
    for place, (seconds, why) in enumerate(again):
        again[place] = seconds - take(seconds, "lost", why, again=True), why
    if start.failed:
        take(left, "lost", cause)
    take(left, "saving" if ended and start.stepping is not None and any(columns.values()) else "unknown")
    return spent
