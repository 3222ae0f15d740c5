"""Looking for files: in folders, behind globs, and through fsspec at URLs."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.data.read.streams import is_remote


@dataclass(frozen=True)
class Entry:
    """Something that was come upon.

    Attributes:
        path: where it lies, a path or a URL.
        name: its path below the input that led to it, JSON-safe.
        real: its path with every link resolved.
        size: bytes as stored.
        problem: why it cannot be read; empty if it can.
        folder: it is a folder; those are told only with a problem.
    """

    path: str
    name: str
    real: str
    size: int = 0
    problem: str = ""
    folder: bool = False


class NoPlaceError(Exception):
    """An input leads nowhere.

    Attributes:
        fix: what to do.
    """

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(rule)
        self.fix = fix


def search(given: str, exclude: Sequence[str]) -> Iterator[Entry]:
    """The files that one entry of data.input leads to, whatever their ending.

    Raises:
        NoPlaceError: it names nothing that exists or can be read.
    """
    return _remote(given, exclude) if is_remote(given) else _local(given, exclude)


def is_folder(given: str) -> bool:
    """Whether an entry of data.input that exists is a folder; URLs always pass for one."""
    return is_remote(given) or Path(given).expanduser().is_dir()


def printable(name: str) -> str:
    """A file name as Unicode text, bytes that are none as backslash escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _local(given: str, exclude: Sequence[str]) -> Iterator[Entry]:
    path = Path(given).expanduser()
    if path.is_file():
        if not os.access(path, os.R_OK):
            raise NoPlaceError("cannot be read", "mend its permissions")
        yield _file(path, path.parent)
    elif path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise NoPlaceError("cannot be read", "mend its permissions")
        yield from _walk(path, path, exclude)
    else:
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
        matches = sorted(root.glob(str(path.relative_to(root)))) if glob.has_magic(given) else []
        if not matches:
            raise NoPlaceError("no such file, folder or match", "mend the path")
        for match in matches:
            if not any(_matches(part, exclude) for part in match.relative_to(root).parts):
                yield from _walk(match, root, exclude) if match.is_dir() else [_file(match, root)]


def _walk(folder: Path, root: Path, exclude: Sequence[str]) -> Iterator[Entry]:
    """Every file below a folder. Links to folders are followed, each real folder once."""
    seen: set[str] = set()
    refused: list[OSError] = []
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=refused.append):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not _matches(name, exclude))
        yield from (_file(Path(parent, name), root, real) for name in sorted(files) if not _matches(name, exclude))
    for error in refused:
        where = str(error.filename)
        yield Entry(where, printable(os.path.relpath(where, root)), where, problem=f"cannot be listed: {error.strerror}", folder=True)


def _file(path: Path, root: Path, real_folder: str = "") -> Entry:
    """A file and what is known of it, with few questions to the file system.

    Args:
        real_folder: its folder with every link resolved, where that is known.
    """
    place, name = str(path), printable(path.relative_to(root).as_posix())
    real = os.path.realpath(path) if not real_folder or path.is_symlink() else f"{real_folder}/{path.name}"
    try:
        info = path.stat()
    except OSError as error:
        return Entry(place, name, real, problem=f"is a broken link: {error.strerror}")
    if not stat.S_ISREG(info.st_mode):
        return Entry(place, name, real, problem="is no regular file")
    return Entry(place, name, real, info.st_size, "" if os.access(path, os.R_OK) else "cannot be read: its permissions forbid it")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _remote(given: str, exclude: Sequence[str]) -> Iterator[Entry]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise NoPlaceError("a URL needs fsspec", "pip install 'tannschen[remote]'") from error
    try:
        system, given_path = url_to_fs(given)
        root, found = _listed(system, given_path)
    except ImportError as error:
        raise NoPlaceError(f"its protocol needs a package: {error}", "install that package beside fsspec") from error
    except Exception as error:  # every protocol raises errors of its own
        raise NoPlaceError(f"cannot be listed: {error}", "mend the URL, or what the protocol needs to log in") from error
    if not found:
        raise NoPlaceError("no such file, folder or match", "mend the URL")
    for path in sorted(found):
        name = path.removeprefix(root).lstrip("/")
        if found[path]["type"] == "file" and (path == given_path or not any(_matches(part, exclude) for part in name.split("/"))):
            url = system.unstrip_protocol(path)
            yield Entry(url, printable(name), url, found[path]["size"] or 0)


def _listed(system: Any, path: str) -> tuple[str, dict[str, Any]]:
    """(the folder that names are relative to, path -> what is known of it) for every file at a path, below it or behind it as a glob."""
    if glob.has_magic(path):
        fixed = itertools.takewhile(lambda part: not glob.has_magic(part), path.split("/"))
        found: dict[str, Any] = {}
        for match, info in system.glob(path, detail=True).items():
            found |= system.find(match, detail=True) if info["type"] == "directory" else {match: info}
        return "/".join(fixed), found
    if system.isfile(path):
        return path.rpartition("/")[0], {path: system.info(path)}
    return path.rstrip("/"), system.find(path, detail=True)
