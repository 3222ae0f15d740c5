"""Input file search: folders, globs, and URLs through fsspec."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import re
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.common import atomic_files
from pipeline.common.remote import is_remote

#: Numbers in WebDataset's notation.
_NUMBERS = re.compile(r"\{\d+\.\.\d+\}")
EXCLUDED, AGAIN = "excluded by data.exclude", "reached again by another path"
"""Reasons not to read a file or a folder."""

_VERSION_KEYS = ("ETag", "etag", "LastModified", "last_modified", "updated", "mtime", "modified")
"""Fields of fsspec's file information that change when a file is written; every protocol has its own."""


@dataclass(frozen=True)
class FoundFile:
    """A file, or a folder that cannot be listed.

    Attributes:
        path: local path or URL.
        name: path relative to the input that contains it, JSON-safe.
        real: path with all symbolic links resolved.
        size: size as stored, in bytes.
        version: changes when the file is written: its modification time, or the ETag or modification time of a remote file.
        problem: why it cannot be read; empty if it can.
        skipped: why it is not read although it could be; empty if it is.
        folder: whether it is a folder; folders are returned only if they are not searched.
    """

    path: str
    name: str
    real: str
    size: int = 0
    version: str = ""
    problem: str = ""
    skipped: str = ""
    folder: bool = False


class InputPathError(Exception):
    """An input path or URL does not exist or cannot be read."""

    def __init__(self, rule: str, fix: str) -> None:
        super().__init__(rule)
        self.fix = fix


def search(given: str, exclude: Sequence[str]) -> Iterator[FoundFile]:
    """Yield the files of one entry of data.input, regardless of their suffix.

    Raises:
        InputPathError: the entry does not exist or cannot be read.
    """
    return _remote(given, exclude) if is_remote(given) else _local(given, exclude)


def expand_numbers(given: str) -> list[str]:
    """Return the files of WebDataset's notation for numbered shards, such as shard-{000..099}.tar; another input as it is.

    It names the files of a server that cannot list them.
    """
    if not _NUMBERS.search(given) or "::" in given or Path(given).expanduser().exists():
        return [given]
    from webdataset.shardlists import expand_urls  # loads torch

    return list(expand_urls(given))


def is_folder(given: str) -> bool:
    """Whether an existing entry of data.input is a folder; URLs always count as folders."""
    return is_remote(given) or Path(given).expanduser().is_dir()


def printable(name: str) -> str:
    """A file name as Unicode text, with undecodable bytes as backslash escapes."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _local(given: str, exclude: Sequence[str]) -> Iterator[FoundFile]:
    path = Path(given).expanduser()
    if path.is_file():
        if not os.access(path, os.R_OK):
            raise InputPathError("cannot be read", "fix its permissions")
        yield _file(path, path.parent)
    elif path.exists() and not path.is_dir():
        raise InputPathError(f"is {atomic_files.kind(path.stat())}, not a file", "write its content to a file, and name that file")
    elif path.is_dir():
        if not os.access(path, os.R_OK | os.X_OK):
            raise InputPathError("cannot be read", "fix its permissions")
        yield from _walk(path, path, exclude)
    else:
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
        matches = sorted(root.glob(str(path.relative_to(root)))) if glob.has_magic(given) else []
        if not matches:
            raise InputPathError("no such file, folder or match", "correct the path")
        for match in matches:
            if not any(_matches(part, exclude) for part in match.relative_to(root).parts):
                yield from _walk(match, root, exclude) if match.is_dir() else [_file(match, root)]
            else:
                yield _skipped_folder(match, root, EXCLUDED) if match.is_dir() else replace(_file(match, root), skipped=EXCLUDED)


def _walk(folder: Path, root: Path, exclude: Sequence[str]) -> Iterator[FoundFile]:
    """Yield every file below a folder, and the folders that are not searched.

    Symbolic links to folders are followed; each real folder is visited once.
    """
    seen: set[str] = set()
    refused: list[OSError] = []
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=refused.append):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            yield _skipped_folder(Path(parent), root, AGAIN)
            continue
        seen.add(real)
        yield from (_skipped_folder(Path(parent, name), root, EXCLUDED) for name in sorted(folders) if _matches(name, exclude))
        folders[:] = sorted(name for name in folders if not _matches(name, exclude))
        for name in sorted(names):
            entry = _file(Path(parent, name), root, real)
            yield replace(entry, skipped=EXCLUDED) if _matches(name, exclude) else entry
    for error in refused:
        where = str(error.filename)
        yield FoundFile(where, printable(os.path.relpath(where, root)), where, problem=f"cannot be listed: {error.strerror}", folder=True)


def _file(path: Path, root: Path, real_folder: str = "") -> FoundFile:
    """The entry of a file, built with few file system calls: `real_folder` is its folder without symbolic links, if known."""
    location, name = str(path), printable(path.relative_to(root).as_posix())
    real = os.path.realpath(path) if not real_folder or path.is_symlink() else f"{real_folder}/{path.name}"
    try:
        info = path.stat()
    except OSError as error:
        return FoundFile(location, name, real, problem=f"is a broken link: {error.strerror}")
    if not stat.S_ISREG(info.st_mode):
        return FoundFile(location, name, real, problem=f"is {atomic_files.kind(info)}, not a file")
    problem = "" if os.access(path, os.R_OK) else "cannot be read: its permissions forbid it"
    return FoundFile(location, name, real, info.st_size, _version(info), problem)


def _skipped_folder(path: Path, root: Path, reason: str) -> FoundFile:
    return FoundFile(str(path), printable(path.relative_to(root).as_posix()), str(path), skipped=reason, folder=True)


def _version(info: os.stat_result) -> str:
    seconds, nanoseconds = divmod(info.st_mtime_ns, 10**9)
    return f"modified {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(seconds))}.{nanoseconds:09d} UTC"


def change(path: str, size: int, version: str) -> str:
    """What has changed in a local file since its entry was made; empty if nothing has.

    Args:
        size, version: of the entry. A file without a version, and a remote one, is not compared.
    """
    if is_remote(path) or not version:
        return ""
    try:
        info = Path(path).stat()
    except FileNotFoundError:
        return f"had {size:,} bytes when it was listed, and no longer exists"
    if (info.st_size, _version(info)) == (size, version):
        return ""
    return f"had {size:,} bytes ({version}) when it was listed, and has {info.st_size:,} ({_version(info)})"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _remote(given: str, exclude: Sequence[str]) -> Iterator[FoundFile]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise InputPathError("a URL needs fsspec", "pip install '.[remote]' at the root of the repository") from error
    try:
        system, given_path = url_to_fs(given)
        root, infos = _listed(system, given_path)
    except ImportError as error:
        raise InputPathError(f"its protocol needs a package: {error}", "install that package in addition to fsspec") from error
    except Exception as error:  # every protocol raises its own exception types
        raise InputPathError(f"cannot be listed: {error}", "correct the URL, or the credentials for its protocol") from error
    if not infos:
        raise InputPathError("no such file, folder or match", "correct the URL")
    for path in sorted(infos):
        name = path.removeprefix(root).lstrip("/")
        if infos[path]["type"] == "file":
            skipped = EXCLUDED if path != given_path and any(_matches(part, exclude) for part in name.split("/")) else ""
            url = system.unstrip_protocol(path)
            version = next((f"{key} {infos[path][key]}" for key in _VERSION_KEYS if infos[path].get(key)), "")
            yield FoundFile(url, printable(name), url, infos[path]["size"] or 0, version, skipped=skipped)


def _listed(system: Any, path: str) -> tuple[str, dict[str, Any]]:
    """List the files of a remote path, folder or glob: (the folder that names are relative to, path -> fsspec info)."""
    if glob.has_magic(path):
        fixed = itertools.takewhile(lambda part: not glob.has_magic(part), path.split("/"))
        infos: dict[str, Any] = {}
        for match, info in system.glob(path, detail=True).items():
            infos |= system.find(match, detail=True) if info["type"] == "directory" else {match: info}
        return "/".join(fixed), infos
    if system.isfile(path):
        return path.rpartition("/")[0], {path: system.info(path)}
    return path.rstrip("/"), system.find(path, detail=True)
