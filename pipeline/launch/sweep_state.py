"""The points of a submitted sweep: what each does by Slurm and by the files of its run, and jobs for those that failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.config import compose
from pipeline.config.command_line import quoted
from pipeline.config.rules import check
from pipeline.launch import job_size, slurm, sweep_manifest, sweep_submission, sweep_table
from pipeline.launch.sweep_manifest import Entry, Manifest
from pipeline.launch.sweep_submission import Point
from pipeline.report import run as runs
from pipeline.report.run import Run, State

#: State of a point whose run directory has no file of a run.
NOT_STARTED = "not started"
#: States of a run whose end the manifest may know better: a point that was started again here, and failed before it wrote an event.
_ENDED = (State.STOPPED, State.FAILED, State.SILENT)
#: States of a run that needs a job.
_ALIVE = (State.RUNNING, State.STARTING)


@dataclass(frozen=True)
class PointState:
    """A point at this moment.

    Attributes:
        entry: of the manifest.
        values: the settings that differ between the points.
        state: what Slurm says of its newest job (pending, with the reason; running), else what the files of its run say.
        reason: why, in one line.
        run: the numbers of its run; None if it has not begun.
    """

    entry: Entry
    values: tuple[str, ...]
    state: str
    reason: str
    run: Run | None


def read(manifest: Manifest) -> list[PointState]:
    """Return the points of a sweep, in the order of their numbers. Without an answer of Slurm, the files of the runs tell alone."""
    entries, values = manifest.sorted(), manifest.differing()
    queue = _queue() if any(entry.job is not None for entry in entries) else None
    found = []
    for entry in entries:
        folder = Path(entry.run_dir)
        run = runs.read(folder) if (folder / "config.yaml").exists() or (folder / "events.jsonl").exists() else None
        state, reason = (queue or {}).get(entry.job or -1) or _without_job(entry, run)
        if run is not None and queue is not None and (job := _job_of(run)) is not None and int(job) not in queue:
            state, reason = str(State.FAILED), f"job {job} ended without a record: killed, or its first node was lost"
        found.append(PointState(entry, values[entry.id], state, reason, run))
    return found


def _job_of(run: Run) -> str | None:
    """The job that a run needs, as its files say; None if it does not run, or runs outside of Slurm."""
    jobs = run.life.jobs
    last = run.starts[-1].job if run.starts else jobs[-1] if jobs else None
    return last.id if last is not None and run.state in _ALIVE else None


def _without_job(entry: Entry, run: Run | None) -> tuple[str, str]:
    """State and reason of a point that has no job in the queue: what is recorded of its run on this machine, else what its files say."""
    if entry.outcome and (run is None or run.state in _ENDED):
        state, _, reason = entry.outcome.partition(": ")
        return state, reason
    if run is not None:
        return str(run.state), "; ".join(filter(None, (run.trouble, run.reason)))
    if entry.log is not None and Path(entry.log).is_file():
        return "ended", f"see {entry.log}"
    return NOT_STARTED, ""


def row_of(point: PointState) -> sweep_table.Point:
    """Return a point of an earlier command for the table of its sweep."""
    steps = None if point.run is None else point.run.steps
    state = "" if point.state == State.FINISHED and steps is not None else ": ".join(filter(None, (point.state, point.reason)))
    return sweep_table.Point(Path(point.entry.run_dir), point.values, steps, state)


def _queue() -> dict[int, tuple[str, str]] | None:
    """The jobs of this user that wait or run: id -> state and reason; None if Slurm does not answer."""
    try:
        printed = slurm.command(["squeue", "--me", "--noheader", "--format=%A|%T|%r"])
    except slurm.SlurmError:
        return None
    lines = (line.split("|", 2) for line in printed.splitlines() if line.count("|") >= 2)
    return {int(number): (state.lower(), "" if reason == "None" else reason) for number, state, reason in lines}


def resubmit(manifest: Manifest, numbers: Sequence[int], arguments: Sequence[str], at_once: int | None) -> list[Point]:
    """Submit the points that are neither finished nor in the queue, with the configuration files as they are now.

    Args:
        manifest: of the sweep.
        numbers: only these points; empty for all.
        arguments: the command, for the snapshot.
        at_once: as of sweep_submission.submit.

    Returns:
        The points, with their new states.

    Raises:
        UserError: a point is not valid any more, or Slurm rejects its job. No job is left.
    """
    compose.register()
    own = [Path(folder) for folder in manifest.config_dirs]
    points = []
    for entry in manifest.sorted():
        if numbers and entry.number not in numbers:
            continue
        words = (*entry.options, *entry.overrides)
        found = [*compose.folder_options(own), *words, f"run_dir={quoted(entry.run_dir)}"]
        config = compose.recompose(found)
        check.check(*job_size.expected(config, found, words))
        points.append(Point(entry, config, words))
    sweep_submission.refuse(points, own, at_once)
    sweep_submission.submit(points, manifest, own, arguments, at_once)
    return points


def cancel(manifest: Manifest) -> list[int]:
    """Cancel the jobs of a sweep that wait or run, which is recorded in its manifest, and return their ids.

    Raises:
        slurm.SlurmError: scancel failed.
    """
    own = {entry.job for entry in manifest.entries.values() if entry.job is not None}
    jobs = sorted(own & set(_queue() or {}))
    if jobs:
        slurm.command(["scancel", *map(str, jobs)])
        for entry in manifest.sorted():
            if entry.job in jobs:
                manifest = manifest.with_outcome(entry.id, "canceled")
        manifest.write()
    return jobs


def manifest_of(folder: Path) -> Manifest:
    """Return the manifest of a sweep.

    Raises:
        UserError: the folder has none, or it is damaged.
    """
    manifest = sweep_manifest.read(folder)
    if not manifest.entries:
        fix = "name the run_dir of a sweep, the folder above those of its runs"
        rule = f"has a {sweep_manifest.NAME} without points" if (folder / sweep_manifest.NAME).exists() else f"has no {sweep_manifest.NAME}"
        raise UserError.of("SWEEP", str(folder), rule, fix)
    return manifest
