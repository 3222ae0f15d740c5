"""The jobs of a run and the starts of its ranks, from its events. Events of versions that wrote fewer of them are read as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.common.errors import NEXT_PHASE
from pipeline.report.run_files import is_finite

#: Actions after which a job is over.
_LAST_ACTIONS = ("end", "requeue", "requeued", "chain")


@dataclass
class RecordedJob:
    """A Slurm job, or its part between two stays in the queue.

    Attributes:
        id: of Slurm.
        nodes: number of its nodes, spares included.
        begin: seconds since 1970; Slurm's own time if it is known.
        end: seconds since 1970; None if no end is recorded.
        limit: end of its time limit, seconds since 1970.
        action: what followed: end, requeue (requeued by Slurm) or chain; empty if no end is recorded.
        reason: of the action.
        next: id of the next job of a chain.
        exclude: nodes that it shall not get when it waits in the queue, or the next job of the chain.
        asked: reason for which Slurm was asked to put it back into the queue, without a recorded answer.
        gone: for each node that it has lost, when that was found, seconds since 1970: Slurm takes it out of the job.
    """

    id: str
    nodes: int
    begin: float
    end: float | None = None
    limit: float | None = None
    action: str = ""
    code: int | None = None
    reason: str = ""
    next: str | None = None
    exclude: tuple[str, ...] = ()
    asked: str = ""
    gone: list[float] = field(default_factory=list)

    def node_seconds(self, until: float) -> float:
        """Return its node-seconds, up to a time if no end is recorded."""
        end = until if self.end is None else self.end
        return max(self.nodes * (end - self.begin) - sum(end - time for time in self.gone), 0.0)


@dataclass
class Start:
    """A start of the ranks.

    Attributes:
        begin: seconds since 1970.
        job: the Slurm job; None outside of Slurm.
        nodes: names of the nodes of the ranks.
        step: of the checkpoint that it continues, 0 for none.
        layout: sizes of the axes, ZeRO stage and micro-batch; empty if it is unknown.
        version: version and commit of the program; empty if it is unknown.
        ready: when the weights were loaded and training began, seconds since 1970; None if it is unknown.
        cause: why the ranks were started again; empty for the first start.
        changed: settings that differ from those of the start before, "key: old -> new".
        end: seconds since 1970; None if no end is recorded.
        last: time of its last event.
        end_step: of the newest checkpoint at its end; None if it is unknown.
        code: exit code of the ranks.
        failed: whether they failed; a run that goes on later has not.
        reason: why they ended.
        place: node and line of the error.
        unrecorded: whether its end is not recorded, and only that it wrote something until `end` is known.
        leaves: whether rank 0 has ended, so that the end of all ranks, and what follows, should be recorded soon.
        loading: seconds in which weights were read.
        stepping: when its first step began, seconds since 1970; None if it is unknown.
        left: when rank 0 ended, seconds since 1970; None if it is unknown.
        abandoned: seconds of the steps of earlier starts that it makes again.
        rewound: seconds of the steps that it left after loss spikes, and of reading a checkpoint then.
        blamed: nodes that did not answer, and that of the rank that failed first.
    """

    begin: float
    job: RecordedJob | None
    nodes: tuple[str, ...]
    step: int
    layout: str = ""
    version: str = ""
    ready: float | None = None
    cause: str = ""
    changed: tuple[str, ...] = ()
    end: float | None = None
    last: float = 0.0
    end_step: int | None = None
    code: int | None = None
    failed: bool = False
    reason: str = ""
    place: str = ""
    unrecorded: bool = False
    leaves: bool = False
    loading: float = 0.0
    stepping: float | None = None
    left: float | None = None
    abandoned: float = 0.0
    rewound: float = 0.0
    blamed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Life:
    """What the events of a run tell.

    Attributes:
        jobs: in order; of job arrays or restarts in the queue, each stay is one.
        starts: in order.
        corpora: samples of an epoch of each corpus, of the last start that names them.
        last: time of the last event, None without events.
        problems: what is missing.
        excluded: time, node and reason of each time that a node was left out.
    """

    jobs: tuple[RecordedJob, ...]
    starts: tuple[Start, ...]
    corpora: dict[str, int]
    last: float | None
    problems: tuple[str, ...]
    excluded: tuple[tuple[float, str, str], ...] = ()

    @property
    def ended(self) -> bool:
        """Whether the end of the last start, and of its job, is recorded."""
        return bool(self.starts) and self.starts[-1].end is not None and all(job.end is not None for job in self.jobs[-1:])


def life_of(events: Sequence[dict[str, Any]]) -> Life:
    """Return the jobs and starts that events tell of; unknown events and fields are ignored."""
    reader = _Reader()
    for event in events:
        reader.read(event)
    return reader.result(events[-1]["time"] if events else None)


class _Reader:
    """Reads events one after the other."""

    def __init__(self) -> None:
        self._jobs: list[RecordedJob] = []
        self._starts: list[Start] = []
        self._corpora: dict[str, int] = {}
        self._problems: list[str] = []
        self._excluded: list[tuple[float, str, str]] = []
        self._cause = ""

    def read(self, event: dict[str, Any]) -> None:
        """Read an event."""
        match event["event"]:
            case "job_start":
                self._job_start(event)
            case "chain":
                if (job := self._job(event)) is not None:
                    job.next = _text(event, "next") or None
            case "limit" | "requeue_asked":
                if (job := self._job(event)) is not None:
                    job.limit, job.asked = _number(event, "limit") or job.limit, _text(event, "reason")
            case "ranks_start":
                self._start(event)
            case "run_start":
                self._run_start(event)
            case "steps_start" | "rewind":
                self._steps(event)
            case "exclude":
                self._excluded += [(event["time"], node, _text(event, "reason")) for node in _names(event, "nodes")]
            case "ranks_end":
                self._ranks_end(event)
            case "run_end":
                self._run_end(event)
            case "action":
                self._action(event)

    def result(self, last: float | None) -> Life:
        """Return what was read."""
        return Life(tuple(self._jobs), tuple(self._starts), self._corpora, last, tuple(self._problems), tuple(self._excluded))

    def _job(self, event: dict[str, Any]) -> RecordedJob | None:
        """The job of an event, if it is the current one."""
        job = self._jobs[-1] if self._jobs else None
        return job if job is not None and job.end is None and job.id == str(event.get("job")) else None

    def _open(self) -> Start | None:
        """The start that has not ended."""
        return self._starts[-1] if self._starts and self._starts[-1].end is None else None

    def _job_start(self, event: dict[str, Any]) -> None:
        """A job begins; an open one was killed with its supervisor, and Slurm tells when its nodes were free, if it continues here."""
        if self._jobs and (before := self._jobs[-1]).end is None:
            continues = str(event.get("job")) in (before.id, before.next)
            why = f": {before.asked}" if before.asked else " without a record: killed, or its first node was lost"
            self._abandon(f"job {before.id} ended{why}", _number(event, "queued") if continues else None)
        begin = _number(event, "started")
        nodes = event.get("nodes")
        size = len(nodes) if isinstance(nodes, list) else 1
        self._jobs.append(
            RecordedJob(str(event.get("job")), size, event["time"] if begin is None else begin, limit=_number(event, "limit"))
        )

    def _start(self, event: dict[str, Any]) -> Start:
        """The ranks are started."""
        if (before := self._open()) is not None and before.leaves and before.reason == NEXT_PHASE:  # the same processes go on
            before.end, self._cause = before.left, NEXT_PHASE
        elif before is not None:
            self._abandon("the ranks ended without a record: killed")
        start = Start(
            begin=event["time"],
            job=self._job(event),
            nodes=_names(event, "nodes"),
            step=max(int(_number(event, "step") or 0), 0),
            layout=_text(event, "layout"),
            version=_text(event, "version"),
            cause=self._cause if self._starts else "",
            last=event["time"],
        )
        self._starts.append(start)
        return start

    def _run_start(self, event: dict[str, Any]) -> None:
        """The ranks begin to train; outside of Slurm this is the first event of a start, but of the first one of several ranks."""
        start = self._open()
        if start is None or start.ready is not None or start.job is not self._job(event):
            start = self._start(event)
            before = self._starts[-2].end if len(self._starts) > 1 else None
            start.begin = min(max(_number(event, "began") or event["time"], before or 0.0), event["time"])
        start.nodes = _names(event, "nodes") if start.job is None else start.nodes  # before, that of rank 0
        start.loading, start.abandoned = (_number(event, name) or 0.0 for name in ("loading", "abandoned"))
        self._extend(start, _number(event, "last_written"))
        start.ready = start.last = event["time"]
        start.step = max(int(_number(event, "step") or 0), 0)
        start.layout = _text(event, "layout") or start.layout
        start.version = _text(event, "version")
        changed = event.get("changed")
        start.changed = tuple(f"{key}: {old} -> {new}" for key, old, new in changed) if isinstance(changed, list) else ()
        corpora = event.get("corpora")
        if isinstance(corpora, dict):
            self._corpora = {str(name): int(count) for name, count in corpora.items() if isinstance(count, int)}

    def _steps(self, event: dict[str, Any]) -> None:
        """The steps begin; or the run leaves them after a loss spike, reads a checkpoint, and they begin again."""
        if (start := self._open()) is None:
            return
        if event["event"] == "rewind":
            start.rewound += _number(event, "seconds") or 0.0
            start.step = min(start.step, int(_number(event, "checkpoint") or 0))
        elif start.stepping is None:
            start.stepping = event["time"]
        else:
            start.rewound += event["time"] - start.last
        start.last = event["time"]

    def _run_end(self, event: dict[str, Any]) -> None:
        """Rank 0 ends. In a job, the end of all ranks follows."""
        if (start := self._open()) is None:
            return
        start.last = start.left = event["time"]
        if start.job is None:
            code = int(_number(event, "code") or 0)
            self._close(start, event, code, failed=code in (1, 2))
        else:
            start.reason, start.place, start.leaves = _text(event, "reason"), _text(event, "where"), True

    def _extend(self, start: Start, last_written: float | None) -> None:
        """A start whose end is not recorded lasted at least until metrics.jsonl was written, as the next start found it."""
        before = next((other for other in reversed(self._starts) if other is not start), None)
        if last_written is None or before is None or not before.unrecorded or before.end is None:
            return
        before.end = max(before.end, min(last_written, start.begin))
        if before.job is not None and before.job.end is not None and before.job is not start.job:
            before.job.end = max(before.job.end, min(before.end, start.job.begin if start.job is not None else start.begin))

    def _ranks_end(self, event: dict[str, Any]) -> None:
        """All ranks have ended. Without ranks, the preflight left too few nodes."""
        if (start := self._open()) is not None:
            self._close(start, event, int(_number(event, "code") or 0), failed=bool(event.get("failed")))
            start.place = " ".join(part for part in (_text(event, "host"), _text(event, "where")) if part)
            lost, is_of_node = _names(event, "lost"), not event.get("follows") and start.code != 2  # else a peer, or the settings
            start.blamed = tuple({_text(event, "host") if is_of_node else "", *lost} - {""})
            if start.job is not None:
                start.job.gone += [event["time"]] * len(lost)

    def _close(self, start: Start, event: dict[str, Any], code: int, *, failed: bool) -> None:
        start.end = start.last = event["time"]
        start.code, start.failed, start.reason = code, failed, _text(event, "reason") or start.reason
        if lost := event.get("lost"):
            start.reason = f"{', '.join(map(str, lost))} lost: {start.reason}" if start.reason else f"{', '.join(map(str, lost))} lost"
        step = _number(event, "step")
        start.end_step = None if step is None else max(int(step), 0)
        self._cause = start.reason or f"exit code {code}"

    def _action(self, event: dict[str, Any]) -> None:
        """The job decides what follows."""
        kind, reason = _text(event, "action"), _text(event, "reason")
        if (start := self._open()) is not None:  # decided by the deputy, when the first node was lost
            self._close(start, {**event, "step": None}, int(_number(event, "code") or 0), failed=True)
        if kind != "restart" and self._starts and not ((last := self._starts[-1]).failed and last.reason):
            self._cause = reason
            last.reason = last.reason or reason  # as of a time limit during the start-up
        job = self._jobs[-1] if self._jobs else None
        if kind in _LAST_ACTIONS and job is not None and job.end is None:
            job.end, job.action, job.reason, job.code = event["time"], kind, reason, int(_number(event, "code") or 0)
            job.exclude = tuple(map(str, event.get("exclude") or ()))

    def _abandon(self, why: str, ended: float | None = None) -> None:
        """An end was not recorded: of a job it is what Slurm tells, else the last event before."""
        if ended is None:
            self._problems.append(f"{why}; its node-hours are counted up to what it wrote last")
        self._cause = why
        start = self._open()
        if start is not None:
            start.end, start.failed, start.reason, start.unrecorded = start.last, True, why, True
        if self._jobs and self._jobs[-1].end is None and why.startswith("job"):
            job = self._jobs[-1]
            last = [start.last for start in self._starts if start.job is job]
            job.end, job.reason = max([job.begin, *last, *([] if ended is None else [ended])]), why


def _text(event: dict[str, Any], name: str) -> str:
    value = event.get(name)
    return " ".join(value.split()) if isinstance(value, str) else ""


def _names(event: dict[str, Any], name: str) -> tuple[str, ...]:
    """The names of a list of an event."""
    value = event.get(name)
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _number(event: dict[str, Any], name: str) -> float | None:
    """A number of an event; None if it has none."""
    value = event.get(name)
    return float(value) if is_finite(value) else None
