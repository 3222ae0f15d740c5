"""Whether a folder that jobs would write is in use: by a job that runs, or by one in the queue."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import xxhash

from pipeline.common import locks
from pipeline.common.errors import Violation
from pipeline.config.command_line import key_of
from pipeline.launch import sweep_manifest
from pipeline.launch.submission import QueuedJob

#: Record of the submitted jobs of a chain, in its run directory; that of a sweep is its manifest, in the folder above.
CHAIN = "submission.json"


def job_name(stage: str, run_dir: Path) -> str:
    """Return the name of the job of a stage in a chain, which no other run has."""
    folder = str(run_dir.absolute())
    return f"{stage}-{re.sub(r'[^A-Za-z0-9_.-]', '_', run_dir.name)[:40]}-{xxhash.xxh3_64_hexdigest(folder.encode())[:8]}"


def _entries(record: Path, key: str) -> list[dict[str, Any]]:
    """The jobs of a record; empty without one, or if it is damaged. Earlier versions wrote the record of a sweep without a key."""
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
        return list(content if isinstance(content, list) else content[key])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def queued(run_dir: Path, stages: Sequence[str], queue: Sequence[QueuedJob]) -> dict[int, str]:
    """Return the jobs in the queue that write a run directory: id -> name.

    They are those of a chain, of a sweep, and those of `sbatch slurm/STAGE.sbatch` of the same stages.

    Args:
        stages: that would be submitted.
        queue: the jobs of this user.
    """
    folder = run_dir.absolute()
    recorded = {int(entry["job"]) for entry in _entries(run_dir / CHAIN, "jobs")}
    recorded |= {
        entry["job"]
        for entry in _entries(run_dir.parent / sweep_manifest.NAME, "points")
        if Path(entry.get("run_dir", "")).absolute() == folder
    }
    names = {job_name(stage, run_dir) for stage in stages}
    return {
        job.number: job.name
        for job in sorted(queue, key=attrgetter("number"))
        if job.number in recorded or job.name in names or folder in _run_dirs(job, stages)
    }


def _run_dirs(job: QueuedJob, stages: Sequence[str]) -> Iterator[Path]:
    """Yield the run directory that the command of a job names, if the command is the script of one of the stages."""
    words = job.command.split()
    if words and words[0].endswith(".sbatch") and Path(words[0]).stem in stages:
        for word in words[1:]:
            if key_of(word) == "run_dir":
                yield Path(job.directory) / word.partition("=")[2].strip("'\"")


def violations(run_dir: Path, stages: Sequence[str], queue: Sequence[QueuedJob]) -> Iterator[Violation]:
    """Yield why jobs that write a run directory would meet other jobs; arguments as those of `queued`."""
    if jobs := queued(run_dir, stages, queue):
        shown = ", ".join(f"{number} ({name})" for number, name in jobs.items())
        fix = f"wait until they have ended, cancel them with scancel {' '.join(map(str, jobs))}, or choose another run_dir"
        yield Violation("run_dir", run_dir, f"is that of jobs in the queue: {shown}", fix)
    else:
        yield from locked("run_dir", run_dir)


def locked(key: str, folder: Path) -> Iterator[Violation]:
    """Yield that a job writes a folder, from the lock that it holds."""
    if (owner := locks.holder(folder)) is not None:
        fix = f"wait until that job has ended, or choose another {key}"
        yield Violation(key, folder, f"is being written by another job: {owner or 'unknown owner'}", fix)
