"""The file system of the run directory as a node sees it: write, flush and read back a file, free space, inodes and quota."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

#: Size of the test file, bytes.
SIZE = 1 << 20
#: Seconds that the quota commands may take.
_QUOTA_SECONDS = 10


def check(folder: Path) -> dict[str, Any]:
    """Write a file into a folder, flush it to disk, read it back and remove it.

    Returns:
        "folder"; "seconds" that it took; "free_gb" and "total_gb" (10^9 bytes) for this user; "free_inodes" (None if there is no limit);
        "quota": lines of `quota` or `lfs quota` that name an exceeded limit; "error": None, or what failed.
    """
    result: dict[str, Any] = {"folder": str(folder), "error": None, "quota": []} | space(folder)
    started = time.monotonic()
    path = folder / f".preflight.{socket.gethostname()}.{os.getpid()}.partial"
    content = os.urandom(SIZE)
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            written = 0
            while written < SIZE:
                written += os.write(handle, content[written:])
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)  # read from the file system, not from this node's memory
            os.lseek(handle, 0, os.SEEK_SET)
            back = b"".join(iter(lambda: os.read(handle, SIZE), b""))
        finally:
            os.close(handle)
            path.unlink(missing_ok=True)
        if back != content:
            result["error"] = "other bytes were read than written"
    except OSError as error:
        result["error"] = error.strerror or str(error)
    result["seconds"] = round(time.monotonic() - started, 3)
    result["quota"] = exceeded_quotas(folder)
    return result


def space(folder: Path) -> dict[str, Any]:
    """Free space and inodes of a file system for this user, as check() returns them; empty if it does not answer."""
    try:
        state = os.statvfs(folder)
    except OSError:
        return {}
    return {
        "free_gb": round(state.f_bavail * state.f_frsize / 1e9, 6),
        "total_gb": round(state.f_blocks * state.f_frsize / 1e9, 6),
        "free_inodes": state.f_favail if state.f_files else None,
    }


def without_locks(file: Path) -> str:
    """Return why locks of a file would admit two jobs to a folder; empty if they do not."""
    with open(file, "r+b") as first, open(file, "r+b") as second:
        try:
            for lock in (fcntl.lockf, fcntl.flock):
                lock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.strerror or str(error)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
            mount = max((words for words in mounts if file.resolve().is_relative_to(words[1])), key=lambda words: len(words[1]))
            return "hold on one node only (mount option localflock)" if "localflock" in mount[3].split(",") else ""
        return "two processes hold the same one"


def exceeded_quotas(folder: Path) -> list[str]:
    """Lines of the quota commands of this machine that mark a limit as exceeded; empty where there are none."""
    lines = []
    for command in (["quota", "-w"], ["lfs", "quota", "-q", "-u", str(os.getuid()), str(folder)]):
        if shutil.which(command[0]):
            try:
                printed = subprocess.run(
                    command, capture_output=True, text=True, errors="replace", timeout=_QUOTA_SECONDS, check=False
                ).stdout
            except (OSError, subprocess.TimeoutExpired):
                continue
            lines += [" ".join(line.split()) for line in printed.splitlines() if marks_excess(line)]
    return lines


def marks_excess(line: str) -> bool:
    """Whether a line of a quota command marks a number as above its limit, by an asterisk."""
    return re.search(r"(^|\s)\d+(\.\d+)?[kKMGTP]?\*(\s|$)", line) is not None
