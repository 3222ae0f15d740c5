"""The lock that admits one job at a time to an output folder."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.common.atomic_files import make_folder
from pipeline.common.errors import UserError

log = logging.getLogger("pipeline")


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
