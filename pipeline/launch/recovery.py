"""What follows the end of the ranks of a job: a function of how they ended, of what Slurm allows and of what the run has left.

The functions at the end read and remove files of the run directory; all others only decide.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from pipeline.checkpoint import native
from pipeline.common import events, locks
from pipeline.common.ends import End
from pipeline.common.errors import CONTINUE, INTERRUPTED, TERMINATED
from pipeline.launch import snapshot
from pipeline.launch.allocation import Allocation
from pipeline.launch.rank_step import StepEnd

#: Exit code of ranks that refuse their configuration or inputs.
_INVALID = 2
#: A job with less time until its limit is not worth another start of its ranks, seconds.
LEAST_SECONDS = 180.0


class ActionKind(StrEnum):
    """What a job does after its ranks have ended.

    END: it ends. RESTART: it starts the ranks again, on the nodes that it has. REQUEUE: it goes back to the queue under the same id.
    CHAIN: the next job of the chain continues. REQUEUED: Slurm itself has put it back into the queue, and ends it.
    """

    END = "end"
    RESTART = "restart"
    REQUEUE = "requeue"
    CHAIN = "chain"
    REQUEUED = "requeued"


@dataclass(frozen=True)
class Action:
    """A decision.

    Attributes:
        code: its exit code, if it ends.
        reason: in one line.
        exclude: nodes on which the run must not continue.
    """

    kind: ActionKind
    code: int
    reason: str
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True)
class Situation:
    """The end of the ranks, and what can follow.

    Attributes:
        code: exit code of the ranks (rank_step.judge).
        first: the failure that the others follow; None for none.
        lost: nodes that do not answer.
        progress: whether a checkpoint was completed since the ranks were started.
        failures: failures in a row without progress, with this one.
        most_failures: cluster.max_retries.
        nodes: nodes that answer and are not excluded, without that of the first failure.
        blamed_before: nodes on which a rank failed before, in this job.
        needed: nodes that the ranks had.
        fewest: nodes on which the ranks could start again, if fewer are left; 0 for `needed`.
        seconds_left: until the time limit of the job.
        preempted: Slurm takes the nodes for another job.
        canceled: this job was told to end, by SIGTERM to its script; srun gets the signal as well, and kills the ranks.
        requeued: Slurm has put the job back into the queue, because a node was lost or somebody asked for it.
        can_requeue: whether Slurm would put the job back into the queue.
        chain: whether the next job of a chain waits.
        stopped: a user asked the run to stop.
        phase: nodes of the phase of the run that begins (training.batch_rampup), if it has others than the last one.
        has_phase: whether the job has just these nodes.
    """

    code: int
    first: End | None = None
    lost: tuple[str, ...] = ()
    progress: bool = False
    failures: int = 0
    most_failures: int = 3
    nodes: int = 1
    blamed_before: tuple[str, ...] = ()
    needed: int = 1
    fewest: int = 0
    seconds_left: float = float("inf")
    preempted: bool = False
    canceled: bool = False
    requeued: bool = False
    can_requeue: bool = True
    chain: bool = False
    stopped: bool = False
    phase: int | None = None
    has_phase: bool = False


def decide(now: Situation) -> Action:
    """Return what follows.

    A run that its user stops, a user's mistake, a canceled job and a run that makes no progress end the job. A run whose time ends, and
    one that is preempted, continue in the queue. After a failure the ranks start again on the nodes that remain: without a node that is
    lost or failed twice, and without one that failed once if there is a spare. If too few nodes remain, the job goes back to the queue and
    excludes them.
    """
    if now.stopped:
        return Action(ActionKind.END, CONTINUE, "stopped by the file stop; the same command continues")
    if now.code == 0:
        return Action(ActionKind.END, 0, "finished")
    if now.requeued:
        return Action(ActionKind.REQUEUED, TERMINATED, "Slurm has put the job back into the queue")
    if now.preempted:
        return _later(now, "preempted", ())
    if (now.canceled and now.code != CONTINUE) or (now.code in (TERMINATED, INTERRUPTED) and now.first is None):
        return Action(ActionKind.END, TERMINATED, "canceled; the same command continues")
    if now.code == CONTINUE:
        if not now.progress and now.failures >= now.most_failures:
            return Action(ActionKind.END, 1, f"{now.failures} jobs in a row ended without a further checkpoint: cluster.time is too short")
        if now.phase is None:
            return _later(now, "the time limit", ())
        if now.has_phase and now.seconds_left >= LEAST_SECONDS:
            return Action(ActionKind.RESTART, now.code, f"the next steps have {now.phase} nodes")
        return _later(now, f"the next steps have {now.phase} nodes", ())
    if now.first is not None and now.first.final:
        return Action(ActionKind.END, now.code, now.first.reason)
    if now.first is None and now.code == _INVALID:  # the ranks could not record why
        return Action(ActionKind.END, now.code, "the ranks refused their settings or inputs, see above")
    if now.failures >= now.most_failures:
        why = "" if now.first is None else f": {now.first.reason}"
        count = f"failure {now.failures} of {now.most_failures} since the last checkpoint (cluster.max_retries)"
        return Action(ActionKind.END, now.code, f"{count}{why}")
    if not (now.progress or _is_passing(now)):
        return Action(ActionKind.END, now.code, "the ranks failed before a checkpoint was written, and not because of a node")
    return _again(now)


def too_few_nodes(now: Situation, bad: Iterable[str]) -> Action:
    """Return what follows a preflight that leaves too few nodes: another allocation, unless that has not helped before."""
    if now.failures >= now.most_failures:
        return Action(ActionKind.END, now.code, f"the preflight failed {now.failures} times in a row (cluster.max_retries)")
    return _later(now, "the preflight leaves too few nodes", tuple(sorted(bad)))


def _is_passing(now: Situation) -> bool:
    """Whether a failure is that of a node, of the network or of the start, and not of the program."""
    return bool(now.lost) or now.first is None or now.first.may_pass


def _again(now: Situation) -> Action:
    """Start again, here if enough nodes remain."""
    bad, first = set(now.lost), now.first
    host = None if first is None or first.follows else first.host
    if first is not None and host is not None and _is_passing(now) and not first.start:
        has_spare = now.nodes >= now.needed
        if first.hardware or host in now.blamed_before or has_spare:
            bad.add(host)
    exclude = tuple(sorted(bad))
    remaining = now.nodes + (1 if host is not None and host not in bad else 0)
    fewest = now.fewest or now.needed
    if remaining >= fewest and now.seconds_left >= LEAST_SECONDS:
        return Action(ActionKind.RESTART, now.code, "started again from the newest checkpoint", exclude)
    why = "too little time is left" if remaining >= fewest else f"{remaining} nodes remain, and {fewest} are needed"
    return _later(now, why, exclude)


def _later(now: Situation, why: str, exclude: Sequence[str]) -> Action:
    if now.chain:
        return Action(ActionKind.CHAIN, 0, why, tuple(exclude))
    if now.can_requeue:
        return Action(ActionKind.REQUEUE, now.code, why, tuple(exclude))
    return Action(ActionKind.END, now.code, f"{why}, and the job cannot be requeued: the same command continues", tuple(exclude))


def explain(stage: str, ended: StepEnd, action: Action, lost: Sequence[str], run_dir: Path | None, step: int) -> list[str]:
    """Return at most five lines.

    Args:
        run_dir: of a training run.
        step: of its newest checkpoint, -1 for none.
    """
    first = ended.first
    lines = [] if first is not None else ended.lines[-1:]  # then the messages of srun are all there is
    if first is not None and not first.final:  # the message of a final one is above
        moment = datetime.fromtimestamp(first.time).isoformat(sep=" ", timespec="seconds")
        event = "lost its peers" if first.follows else "failed first"
        lines.append(f"{stage}: rank {first.rank} on {first.host} {event}, at {moment}: {first.reason}")
        lines += [f"  at {first.where}"] if first.where else []
    lines += [f"  nodes that do not answer: {', '.join(lost)}"] if lost else []
    lines += [f"  newest checkpoint: step {step} of {run_dir}"] if run_dir is not None and step >= 0 else []
    return [*lines, f"{stage}: exit code {ended.code}; {action.kind}: {action.reason}"]


log = logging.getLogger("pipeline")


def newest_step(run_dir: Path | None) -> int:
    """Return the step of the newest complete checkpoint, -1 for none."""
    complete = [] if run_dir is None else native.complete(run_dir)
    return native.step_of(complete[-1]) if complete else -1


def failures_in_a_row(run_dir: Path) -> int:
    """Return the failures of the run, in all of its jobs, since its last progress; settings that the ranks refused (code 2) are none."""
    count = 0
    for event in reversed([event for event in events.read(run_dir) if event["event"] == "ranks_end" and event.get("code") != 2]):
        if event.get("progress") or not event.get("failed"):
            break
        count += 1
    return count


def was_stopped(run_dir: Path | None, since: float) -> bool:
    """Return whether ranks that were started at a time, in seconds since 1970, ended because of the file `stop`."""
    known = [] if run_dir is None else events.read(run_dir)
    ends = [event for event in known if event["event"] == "run_end" and event.get("time", 0) >= since]
    return bool(ends) and ends[-1].get("reason") == "stop"


def job_folder(run_dir: Path | None, granted: Allocation, name: str) -> Path | None:
    """Make an empty folder of this job on the shared file system: in the run directory, else in the working directory.

    Returns:
        Its absolute path; None if it cannot be made, which is logged.
    """
    path = (run_dir or Path.cwd()) / f".job-{granted.job}-{granted.restarts}-{name}"
    try:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
    except OSError as error:
        log.warning("%s: %s", path, error.strerror)
        return None
    return path.absolute()


def remove_leftovers(run_dir: Path) -> None:
    """Remove the folders of job_folder that are there when a job begins: a first node was lost, or a rank wrote as its job ended."""
    for path in run_dir.glob(".job-*-*"):
        shutil.rmtree(path, ignore_errors=True)


def remove_if_unused(run_dir: Path) -> None:
    """Remove a run directory that this job has made for a run that never began."""
    if all(path.name in (events.FILE, snapshot.FOLDER, locks.OF_JOB) for path in run_dir.iterdir()):
        shutil.rmtree(run_dir, ignore_errors=True)
