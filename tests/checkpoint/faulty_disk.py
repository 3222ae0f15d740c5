"""System calls that fail, or after which a process makes no further ones, for tests of what is left on the disk."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

#: Functions of `os` that change files.
CHANGES = ("write", "pwrite", "rename", "replace", "mkdir", "unlink", "remove", "rmdir", "truncate", "ftruncate", "link", "symlink")
#: Those of them that need space on the disk.
NEEDS_SPACE = ("write", "pwrite", "fsync", "rename", "replace", "mkdir", "truncate", "ftruncate", "link", "symlink", "open")


@contextlib.contextmanager
def calls(monkeypatch: Any, on_call: Any) -> Iterator[None]:
    """Call `on_call(name, path, *arguments)` before every call that changes a file."""

    def wrap(name: str, function: Any) -> Any:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            on_call(name, *arguments)
            return function(*arguments, **options)

        return wrapped

    def opener(function: Any) -> Any:
        def wrapped(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if set(mode) & set("wax+"):
                on_call("open", file)
            return function(file, mode, *arguments, **options)

        return wrapped

    def open_flags(path: Any, flags: int, *arguments: Any, **options: Any) -> Any:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            on_call("open", path)
        return real_open(path, flags, *arguments, **options)

    real_open = os.open
    with monkeypatch.context() as patched:
        for name in CHANGES:
            patched.setattr(os, name, wrap(name, getattr(os, name)))
        patched.setattr(os, "fsync", lambda handle: on_call("fsync", handle))  # a power failure is not tested
        patched.setattr(os, "open", open_flags)
        patched.setattr(builtins, "open", opener(builtins.open))
        patched.setattr(io, "open", opener(io.open))
        yield


def count(monkeypatch: Any, function: Callable[[], object]) -> list[str]:
    """Return the names of the calls that change files."""
    made: list[str] = []
    with calls(monkeypatch, lambda name, *_: made.append(name)):
        function()
    return made


class Killed(BaseException):
    """The process would not have lived beyond this call."""


def kill_at(monkeypatch: Any, number: int, function: Callable[[], object]) -> bool:
    """Call a function that is killed before its `number`-th change of a file, in the middle of it if it writes.

    No later call changes a file, so that what handlers of exceptions do has no effect either.

    Returns:
        Whether it was killed; else it made fewer changes.
    """
    made, writes = itertools.count(1), {"write": os.write, "pwrite": os.pwrite}

    def on_call(name: str, *arguments: Any) -> None:
        call = next(made)
        if call == number and name in writes:
            handle, data, *offset = arguments
            writes[name](handle, bytes(data)[: len(data) // 2], *offset)
        if call >= number:
            raise Killed

    try:
        with calls(monkeypatch, on_call):
            function()
    except Killed:
        return True
    return False


@contextlib.contextmanager
def full_disk(monkeypatch: Any, first: int, last: int, number: int = errno.ENOSPC) -> Iterator[list[str]]:
    """The calls `first` to `last` that need space fail; yields the names of the calls."""
    made: list[str] = []

    def on_call(name: str, *arguments: Any) -> None:
        if name in NEEDS_SPACE:
            made.append(name)
            if first <= len(made) <= last:
                raise OSError(number, os.strerror(number), str(arguments[0]))

    with calls(monkeypatch, on_call):
        yield made
