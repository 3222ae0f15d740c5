"""Kills and full disks at a chosen call of the file system, in this process."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


class Killed(BaseException):
    """The process would not have lived beyond this call."""


@dataclass
class Calls:
    """Which calls fail.

    Attributes:
        left: calls that still succeed.
        full: a full disk: writing fails, removing does not. Otherwise a kill: no call changes anything any more.
        made: calls so far.
    """

    left: int
    full: bool = False
    made: int = 0

    def __call__(self, *, writes: bool) -> None:
        if self.full and not writes:
            return
        self.made += 1
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) if self.full else Killed


_WRITES = {"os.mkdir": True, "os.rename": True, "os.remove": False, "os.rmdir": False}
_active: list[Calls] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _active:
        return
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        _active[0](writes=bool(arguments[2] & os.O_CREAT))  # a full disk still opens files that exist
    elif event in _WRITES:
        _active[0](writes=_WRITES[event])


sys.addaudithook(_audit)


@contextmanager
def failing(calls: Calls) -> Iterator[Calls]:
    """Count the calls that change the file system in a block, and fail from a number on."""
    patched: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in ("pwrite", "fsync")}

    def counted(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls(writes=True)
            return None if name == "fsync" else patched[name](*arguments)

        return call

    for name in patched:
        setattr(os, name, counted(name))
    _active.append(calls)
    try:
        yield calls
    finally:
        _active.clear()
        for name, function in patched.items():
            setattr(os, name, function)
