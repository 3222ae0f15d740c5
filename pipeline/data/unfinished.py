"""What an interrupted stage leaves for its rerun: `.unfinished/` in the output folder, one note for every part that is complete.

And who may write the folder: one job at a time.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from pipeline import artifact
from pipeline.data.mpi import Comm
from pipeline.errors import UserError
from pipeline.files import atomic_file, make_folder

log = logging.getLogger("pipeline")


class Unfinished:
    """Notes of finished parts. They count only for the settings they were made with.

    Args:
        folder: the output folder.
        settings: all that determines the content, as in the manifest.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.output = folder
        self.folder = folder / ".unfinished"
        self.settings = json.loads(json.dumps(settings))

    def take_over(self) -> None:
        """Keep an interrupted run's parts if they fit, remove what does not. Called while nobody else is at work here."""
        for partial in self.output.glob(".*.partial"):
            partial.unlink()
        if self.note("settings") != self.settings:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.write("settings", self.settings)

    def note(self, name: str) -> Any:
        """What was noted of a finished part, None if it is still to do."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def write(self, name: str, note: Any) -> None:
        """Note that a part is complete."""
        with atomic_file(self.folder / f"{name}.json", "w") as handle:
            json.dump(note, handle)

    def clear(self) -> None:
        """The stage is finished: forget the notes."""
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def work(
    comm: Comm,
    folder: Path,
    made_as: tuple[str, str],
    settings: dict[str, Any],
    summary: Callable[[dict[str, Any]], str],
    array: str | None = None,
) -> Iterator[Unfinished | None]:
    """The frame of a stage that writes a folder: one job at a time, only what is missing, nothing when all is there.

    Args:
        made_as: the key that names the folder, and the stage that its manifest names.
        settings: all that determines the content.
        summary: the totals of a finished folder, for people.
        array: the job array whose tasks share the work.

    Yields:
        The notes of finished parts; None when the folder is complete.

    Raises:
        UserError: it was made with other settings, or another job is writing it.
    """
    unfinished, (key, stage) = Unfinished(folder, settings), made_as
    done = artifact.find_complete(folder, key=key, stage=stage, settings=settings) if comm.rank == 0 else None
    if done:
        log.info("%s=%s is complete, nothing to do (%s)", key, folder, summary(done.totals))
    if comm.bcast(done is not None):
        yield None
        return
    with claimed(folder, key, array, unfinished.take_over) if comm.rank == 0 else nullcontext():
        comm.barrier()
        yield unfinished


@contextmanager
def claimed(folder: Path, key: str, array: str | None = None, prepare: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Keep other jobs from writing the folder while the block runs. The lock is the kernel's: it ends with the process, however that ends.

    Args:
        key: configuration key that names the folder.
        array: the job array that this process is a task of; tasks of one array share the folder.
        prepare: makes the folder ready; called by whoever comes first, before any other task of the array may go on.

    Raises:
        UserError: another job has it.
    """
    make_folder(folder)
    path = folder / ".lock"
    name = f"job array {array}" if array else f"job {os.environ.get('SLURM_JOB_ID', 'of no scheduler')}"
    handle, first = _locked(path, fcntl.LOCK_EX), True
    if array and handle is None:
        handle, first = _joined(path, name)
    if handle is None:
        owner = _owner(path).strip()
        fix = f"wait until that job has ended, or choose another {key}"
        raise UserError.of(key, folder, f"is being written by another job: {owner or 'it gave no name'}", fix)
    try:
        if first:
            path.write_text(f"{name}, process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
            prepare()
        if array:
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        if _alone(handle):
            path.unlink(missing_ok=True)
        os.close(handle)


def _alone(handle: int) -> bool:
    """Whether no other task of the job array holds the lock too."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _joined(path: Path, name: str) -> tuple[int | None, bool]:
    """The file locked together with the other tasks of our job array, or alone when they left as we came; None when another job has it.

    Returns:
        The file, and whether it is ours alone.
    """
    for wait in range(600):  # the first task holds it alone while it writes its name and prepares the folder
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
    """What the lock says of the job that made it; nothing when that job has just left."""
    with suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8")
    return ""


def _locked(path: Path, kind: int) -> int | None:
    """The locked file, None when somebody else holds it."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError as error:  # a file system without locks
            log.warning("%s: cannot be locked (%s): see to it that no other job writes this folder", path.parent, error.strerror)
            return handle
        try:
            if os.fstat(handle).st_ino == path.stat().st_ino:
                return handle
        except FileNotFoundError:
            pass
        os.close(handle)  # its owner removed it as we came: take the new one


def remove_strangers(folder: Path, pattern: str, names: set[str]) -> None:
    """Remove the shards of an earlier run that the new manifest does not name, so that nobody reads them by a glob."""
    for path in folder.glob(pattern):
        if path.name not in names:
            path.unlink()
