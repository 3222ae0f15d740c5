"""What the files of a run directory tell the supervisor of a job about the run."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from pipeline.checkpoint import native
from pipeline.common import events, locks
from pipeline.launch import snapshot
from pipeline.launch.allocation import Allocation

log = logging.getLogger("pipeline")


def newest_step(run_dir: Path | None) -> int:
    """Return the step of the newest complete checkpoint, -1 for none."""
    complete = [] if run_dir is None else native.complete(run_dir)
    return native.step_of(complete[-1]) if complete else -1


def failures_in_a_row(run_dir: Path) -> int:
    """Return the failures of the run, in all of its jobs, since its last progress; settings that the ranks refused (code 2) are none."""
    found = 0
    for event in reversed([event for event in events.read(run_dir) if event["event"] == "ranks_end" and event.get("code") != 2]):
        if event.get("progress") or not event.get("failed"):
            break
        found += 1
    return found


def was_stopped(run_dir: Path | None, since: float) -> bool:
    """Return whether ranks that were started at a time, in seconds since 1970, ended because of the file `stop`."""
    known = [] if run_dir is None else events.read(run_dir)
    ends = [event for event in known if event["event"] == "run_end" and event.get("time", 0) >= since]
    return bool(ends) and ends[-1].get("reason") == "stop"


def folder(run_dir: Path | None, granted: Allocation, name: str) -> Path | None:
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


def remove_leftovers(run_dir: Path, job: str) -> None:
    """Remove the folders that this job made before it was put back into the queue, if its first node was lost then."""
    for path in run_dir.glob(f".job-{job}-*"):
        shutil.rmtree(path, ignore_errors=True)


def remove_if_unused(run_dir: Path) -> None:
    """Remove a run directory that this job has made for a run that never began."""
    if all(path.name in (events.FILE, snapshot.FOLDER, locks.OF_JOB) for path in run_dir.iterdir()):
        shutil.rmtree(run_dir, ignore_errors=True)
