"""Resuming an interrupted stage: `.unfinished/` in the output folder holds one completion record per finished part.

Also the lock that admits one job at a time to an output folder.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from pipeline import artifact
from pipeline.data.mpi import Comm
from pipeline.errors import UserError
from pipeline.files import atomic_file, make_folder

log = logging.getLogger("pipeline")


class Unfinished:
    """Completion records of finished parts, and the settings that they were written with.

    Args:
        folder: the output folder.
        settings: all settings that determine the output, as in the manifest.
        resume: further settings that must not change until the run is finished, because finished parts depend on them.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], resume: dict[str, Any] | None = None) -> None:
        self.output = folder
        self.folder = folder / ".unfinished"
        self.settings = json.loads(json.dumps(settings))
        self._recorded = {**self.settings, **(resume or {})}

    def take_over(self, key: str, outputs: Sequence[str]) -> None:
        """Continue the interrupted run of these settings, or begin a run. Nothing of another run is removed. The caller holds the lock.

        Args:
            key: configuration key of the folder.
            outputs: glob patterns of the files that the stage writes.

        Raises:
            UserError: the folder holds the unfinished run of other settings, or files that a run would overwrite.
        """
        if (self.output / artifact.MANIFEST).is_file():
            return  # another job has completed the folder since this one looked
        if self.note("settings") is not None:
            self.check_settings(key)
            for partial in self.output.glob(".*.[0-9]*.partial"):  # of atomic_file
                partial.unlink()
            return
        if existing := sorted(path.name for pattern in outputs for path in self.output.glob(pattern)):
            rule = f"contains files of another run or program: {', '.join(existing[:5])}{', ...' if len(existing) > 5 else ''}"
            raise UserError.of(key, self.output, rule, f"set {key} to another folder, or move these files away")
        shutil.rmtree(self.folder, ignore_errors=True)  # what remains of records whose removal was interrupted
        self.write("settings", self._recorded)

    def check_settings(self, key: str) -> None:
        """Compare the settings with those of the unfinished run in the folder.

        Raises:
            UserError: they differ; lists every difference.
        """
        fix = f"run it with those settings to continue, set {key} to another folder, or remove {self.output} to discard the unfinished run"
        artifact.check_settings(self.note("settings") or {}, self._recorded, f"{self.output} holds an unfinished run with", fix)

    def note(self, name: str) -> Any:
        """Return the completion record of a part, None if the part is not finished."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def write(self, name: str, note: Any) -> None:
        """Write the completion record of a part."""
        with atomic_file(self.folder / f"{name}.json", "w") as handle:
            json.dump(note, handle)

    def clear(self) -> None:
        """Delete all completion records; the stage is finished."""
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def work(
    comm: Comm,
    folder: Path,
    made_as: tuple[str, str],
    settings: dict[str, Any],
    summary: Callable[[dict[str, Any]], str],
    outputs: Sequence[str],
    *,
    resume: dict[str, Any] | None = None,
    array: str | None = None,
) -> Iterator[Unfinished | None]:
    """Guard the work of a stage on its output folder: one job at a time, only missing parts, nothing when the folder is complete.

    Args:
        made_as: the configuration key of the folder, and the stage in its manifest.
        settings: all settings that determine the output.
        summary: formats the totals of a finished folder for the log.
        outputs: glob patterns of the files that the stage writes into the folder.
        resume: further settings that must not change until the run is finished.
        array: the job array whose tasks share the work.

    Yields:
        The completion records; None when the folder is complete.

    Raises:
        UserError: the folder was written with other settings, holds files of another run, or another job is writing it.
    """
    unfinished, (key, stage) = Unfinished(folder, settings, resume), made_as
    done = artifact.find_complete(folder, key=key, stage=stage, settings=settings) if comm.rank == 0 else None
    if done:
        log.info("%s=%s is complete, nothing to do (%s)", key, folder, summary(done.totals))
    if comm.bcast(done is not None):
        yield None
        return
    prepare = partial(unfinished.take_over, key, outputs)
    with claimed(folder, key, array, prepare) if comm.rank == 0 else nullcontext():
        if comm.rank == 0:
            done = artifact.find_complete(folder, key=key, stage=stage, settings=settings)
            if not done:
                unfinished.check_settings(key)  # a further task of an array joins without preparing the folder
        if comm.bcast(done is not None):
            yield None
            return
        yield unfinished


@contextmanager
def claimed(folder: Path, key: str, array: str | None = None, prepare: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Lock the folder against other jobs while the block runs. The kernel releases the lock (flock) when the process exits or is killed.

    Args:
        key: configuration key of the folder.
        array: the job array that this process is a task of; tasks of one array share the lock.
        prepare: prepares the folder; the first task calls it before any other task of the array continues.

    Raises:
        UserError: another job holds the lock.
    """
    make_folder(folder)
    path = folder / ".lock"
    name = f"job array {array}" if array else f"job {os.environ.get('SLURM_JOB_ID', 'without a scheduler')}"
    handle, first = _locked(path, fcntl.LOCK_EX), True
    if array and handle is None:
        handle, first = _joined(path, name)
    if handle is None:
        owner = _owner(path).strip()
        fix = f"wait until that job has ended, or choose another {key}"
        raise UserError.of(key, folder, f"is being written by another job: {owner or 'unknown owner'}", fix)
    try:
        if first:
            path.write_text(f"{name}, process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
            prepare()
        if array:
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        if _is_exclusive(handle):
            path.unlink(missing_ok=True)
        os.close(handle)


def _is_exclusive(handle: int) -> bool:
    """Whether no other task of the job array holds the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _joined(path: Path, name: str) -> tuple[int | None, bool]:
    """Lock the file shared with the other tasks of the job array, or exclusively when they have released it in the meantime.

    Returns:
        The file, None when another job holds the lock; and whether the lock is exclusive.
    """
    for wait in range(600):  # the first task holds the exclusive lock while it writes its name and prepares the folder
        handle = _locked(path, fcntl.LOCK_SH)
        owner = _owner(path)
        if handle is not None and owner.startswith(f"{name},"):
            return handle, False
        if handle is not None:
            os.close(handle)
            handle = _locked(path, fcntl.LOCK_EX)
        if handle is not None:
            return handle, True
        if wait >= 20 and not owner.startswith(f"{name},"):
            break
        time.sleep(0.1)
    return None, False


def _owner(path: Path) -> str:
    """The owner that the lock file names; empty when that job has just released the lock."""
    with suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8")
    return ""


def _locked(path: Path, kind: int) -> int | None:
    """Lock the file; return None when another process holds a conflicting lock."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError as error:  # a file system without locks
            log.warning("%s: cannot be locked (%s): make sure that no other job writes this folder", path.parent, error.strerror)
            return handle
        try:
            if os.fstat(handle).st_ino == path.stat().st_ino:
                return handle
        except FileNotFoundError:
            pass
        os.close(handle)  # its owner removed the file in the meantime: lock the new one
