"""The lock that admits one job at a time to an output folder."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.common import signals
from pipeline.common.atomic_files import make_folder
from pipeline.common.errors import ToBeContinued, UserError

log = logging.getLogger("pipeline")

#: Name of the lock file of a folder, and of that which the supervisor of a Slurm job holds in a run directory.
FILE, OF_JOB = ".lock", ".job-lock"
#: Most time to wait for the last checkpoint of a job that has ended.
MINUTES = 30.0
#: End of the text of a lock file whose job has ended.
_LAST_WRITE = "which writes the last checkpoint of that job"


class InUseError(UserError):
    """Another process holds the lock of a folder."""


@contextmanager
def claimed(
    folder: Path, key: str, array: str | None = None, prepare: Callable[[], None] | None = None, minutes: float = MINUTES, file: str = FILE
) -> Iterator[int]:
    """Lock the folder against other jobs while the block runs. The kernel releases the lock (flock) when the process exits or is killed.

    A process that gets the file descriptor keeps the lock as long as it lives. If it survives the job to write the last checkpoint
    (note_last_write), the next job waits for it.

    Args:
        array: the job array that this process is a task of; tasks of one array share the lock.
        prepare: prepares the folder; the first task calls it before any other task of the array continues.
        minutes: most time to wait for the last checkpoint of a job that has ended.

    Yields:
        The file descriptor of the lock.

    Raises:
        InUseError: another job holds the lock, or the last checkpoint of the job before is not written in time.
        UserError: the folder cannot be written.
        ToBeContinued: a signal announced the end of this job while it waited for that.
    """
    make_folder(folder)
    path = folder / file
    name = f"job array {array}" if array else f"job {os.environ.get('SLURM_JOB_ID', 'without a scheduler')}"
    handle, first = _locked(path, fcntl.LOCK_EX), True
    if array and handle is None:
        handle, first = _joined(path, name)
    elif handle is None:
        handle = _after_last_write(path, key, minutes)
    if handle is None:
        raise _in_use(folder, key, _owner(path).strip())
    try:
        if first:
            path.write_text(f"{name}, process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
            if prepare is not None:
                prepare()
        if array:
            fcntl.flock(handle, fcntl.LOCK_SH)
        yield handle
    finally:
        os.close(handle)
        _remove_if_free(path)


def holder(folder: Path) -> str | None:
    """Return the owner that the lock of a folder names if a process holds it, as far as this host can see; None if none does."""
    try:
        handle = os.open(folder / FILE, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(folder / FILE).strip()
    except OSError:  # a file system without locks
        return None
    finally:
        os.close(handle)
    return None


def refuse_held(folder: Path, key: str) -> None:
    """Refuse a folder whose lock a process holds that goes on, as far as this host can see; arguments and errors as those of claimed."""
    owner = holder(folder)
    if owner is not None and not _lets_go(owner):
        raise _in_use(folder, key, owner)


def _in_use(folder: Path, key: str, owner: str) -> InUseError:
    fix = f"wait until that job has ended, or choose another {key}"
    return InUseError.of(key, folder, f"is being written by another job: {owner or 'unknown owner'}", fix)


def _remove_if_free(path: Path) -> None:
    """Remove the file, unless another task of the job array, a process with the file descriptor or another job holds the lock."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), path.stat()):
                path.unlink()
        finally:
            os.close(handle)


def note_last_write(handle: int) -> None:
    """Note in the file that the job has ended, and this process, which keeps the lock, still writes its last checkpoint.

    Args:
        handle: file descriptor of the lock.
    """
    owner = os.pread(handle, 1 << 12, 0).decode().partition(",")[0]
    text = f"{owner}, process {os.getpid()} on {socket.gethostname()}, {_LAST_WRITE}\n"
    os.pwrite(handle, text.encode(), 0)
    os.ftruncate(handle, len(text.encode()))


def _after_last_write(path: Path, key: str, minutes: float) -> int | None:
    """Lock the file as soon as a job that has ended has written its last checkpoint; None if a job that goes on holds the lock.

    Raises:
        InUseError: it was not written in `minutes`.
        ToBeContinued: a signal announced the end of this job.
    """
    said, deadline = False, time.monotonic() + minutes * 60
    while (handle := _locked(path, fcntl.LOCK_EX)) is None:
        owner = _owner(path).strip()
        if not _lets_go(owner):
            return None
        if not said:
            log.warning("%s: the job before has ended; waiting until its last checkpoint is written (%s)", path.parent, owner)
        said = True
        if (code := signals.exit_code()) is not None:
            raise ToBeContinued(code)
        if time.monotonic() > deadline:
            rule = f"the job before has ended, and the lock is still held after {minutes:g} minutes (training.timeout_minutes): {owner}"
            fix = "look whether that process, or one that it started, still writes on that host, end it, and run the same command again"
            raise InUseError.of(key, path.parent, rule, fix)
        time.sleep(0.1)
    return handle


def _lets_go(owner: str) -> bool:
    """Whether the owner of a lock writes the last checkpoint, has ended on this host, or is this job before it was requeued."""
    before = os.environ.get("SLURM_RESTART_COUNT", "0") != "0" and owner.startswith(f"job {os.environ.get('SLURM_JOB_ID')},")
    # The first task of a job array says nothing of the others.
    return before or owner.endswith(_LAST_WRITE) or (not owner.startswith("job array ") and _has_ended(owner))


def _has_ended(owner: str) -> bool:
    """Whether the process that a lock file names ran on this host and has ended."""
    match = re.search(r"process (\d+) on (\S+?),?$", owner)
    if match is None or match[2] != socket.gethostname():
        return False
    try:
        state = Path("/proc", match[1], "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"  # killed, and its parent has not noticed


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
