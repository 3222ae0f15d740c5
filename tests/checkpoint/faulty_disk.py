"""System calls that fail, or after which a process makes no further ones, for tests of what is left on the disk."""

from __future__ import annotations

import builtins
import contextlib
import errno
import io
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

#: Functions of `os` that change files.
CHANGES = ("write", "rename", "replace", "mkdir", "unlink", "remove", "rmdir", "truncate", "ftruncate", "link", "symlink")
#: Those of them that need space on the disk.
NEEDS_SPACE = ("write", "fsync", "rename", "replace", "mkdir", "truncate", "ftruncate", "link", "symlink", "open")


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


def kill_at(monkeypatch: Any, number: int, function: Callable[[], object]) -> bool:
    """Call a function in a child process that is killed before its `number`-th change of a file, in the middle of it if it writes.

    Returns:
        Whether it was killed; else it made fewer changes.
    """
    if child := os.fork():
        return os.waitpid(child, 0)[1] == signal.SIGKILL
    made, write = itertools.count(1), os.write

    def on_call(name: str, *arguments: Any) -> None:
        if next(made) == number:
            if name == "write":
                write(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        with calls(monkeypatch, on_call):
            function()
    finally:
        os._exit(0)


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
