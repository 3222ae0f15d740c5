"""Which files the documents come from, and how several ranks share the reading of them."""

from __future__ import annotations

import fnmatch
import glob
import heapq
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from pipeline.errors import UserError, Violation

SPAN_BYTES = 64 << 20
"""A plain .jsonl file is read in ranges of this many bytes, so that many ranks share a large one."""


@dataclass(frozen=True)
class Source:
    """One input file.

    Attributes:
        path: where it lies.
        name: its path relative to the input it was found under; with an offset it identifies a document wherever the corpus is moved.
        size: bytes on disk.
    """

    path: Path
    name: str
    size: int


@dataclass(frozen=True)
class Span:
    """The documents of a file that begin in the bytes start <= offset < end; end is None for all the rest."""

    source: Source
    start: int
    end: int | None

    @property
    def size(self) -> int:
        """Bytes to read."""
        return (self.source.size if self.end is None else self.end) - self.start


def find(inputs: Sequence[str], suffixes: Sequence[str], exclude: Sequence[str]) -> list[Source]:
    """The files behind `data.input`, sorted by name.

    Args:
        inputs: files, folders (searched to any depth) and globs.
        suffixes: endings of the names that count as documents.
        exclude: globs on single names; a file or folder below a searched folder that matches one is left out.

    Raises:
        UserError: nothing is named, an input finds nothing or cannot be read, or two files have one name. All of it at once.
    """
    if not inputs:
        raise UserError.of("data.input", "[]", "names no documents", "give files, globs or folders: data.input=[corpus/*.jsonl]")
    violations: list[Violation] = []
    found: dict[str, Source] = {}  # real path -> source; a file found twice is read once
    for given in inputs:
        before = len(violations)
        matched = False
        for path, root in _expand(given, exclude):
            if not path.name.endswith(tuple(suffixes)):
                continue
            matched = True
            if not os.access(path, os.R_OK):
                violations.append(Violation("data.input", path, "cannot be read", "mend its permissions"))
                continue
            found.setdefault(os.path.realpath(path), Source(path, path.relative_to(root).as_posix(), path.stat().st_size))
        if not matched and len(violations) == before:
            exists = Path(given).expanduser().exists()
            rule = f"holds no file ending in {', '.join(suffixes)}" if exists else "no such file, folder or match"
            violations.append(Violation("data.input", given, rule, "mend the path, or name other endings in data.suffixes"))
    by_name: dict[str, Source] = {}
    for source in found.values():
        if by_name.setdefault(source.name, source) is not source:
            rule = f"is named {source.name} within its input, and so is {by_name[source.name].path}"
            violations.append(Violation("data.input", source.path, rule, "give their common parent folder as one input"))
    if violations:
        raise UserError(violations)
    return [by_name[name] for name in sorted(by_name)]


def _expand(given: str, exclude: Sequence[str]) -> Iterator[tuple[Path, Path]]:
    """The (file, root) pairs of one entry of data.input, whatever their ending."""
    path = Path(given).expanduser()
    if path.is_file():
        yield path, path.parent
    elif path.is_dir():
        yield from ((file, path) for file in _walk(path, exclude))
    elif glob.has_magic(given):
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
        for match in sorted(root.glob(str(path.relative_to(root)))):
            if not any(_matches(part, exclude) for part in match.relative_to(root).parts):
                files = _walk(match, exclude) if match.is_dir() else [match]
                yield from ((file, root) for file in files)


def _walk(folder: Path, exclude: Sequence[str]) -> Iterator[Path]:
    """Every file below a folder. Links to folders are followed, each real folder once."""
    seen: set[str] = set()
    for parent, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not _matches(name, exclude))
        yield from (Path(parent, name) for name in sorted(files) if not _matches(name, exclude))


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def fingerprint(sources: Sequence[Source]) -> str:
    """The files' names and sizes as a short text: equal for the same corpus, wherever it lies."""
    state = xxhash.xxh3_64()
    for source in sources:
        state.update(os.fsencode(source.name) + b"\0%d\0" % source.size)
    return f"{len(sources)} files, {sum(s.size for s in sources)} bytes, xxh3 {state.hexdigest()}"


def spans(sources: Sequence[Source]) -> list[Span]:
    """The pieces in which the files are read: ranges of a large plain .jsonl, other files whole."""
    pieces: list[Span] = []
    for source in sources:
        if source.name.endswith(".jsonl") and source.size > SPAN_BYTES:
            starts = range(0, source.size, SPAN_BYTES)
            pieces.extend(Span(source, start, min(start + SPAN_BYTES, source.size)) for start in starts)
        else:
            pieces.append(Span(source, 0, None))
    return pieces


def share(pieces: Sequence[Span], rank: int, size: int) -> list[Span]:
    """The pieces that one of `size` ranks reads, balanced by bytes: the largest first, each to the rank that has least."""
    loads = [(0, r) for r in range(size)]
    mine = []
    for piece in sorted(pieces, key=lambda p: (-p.size, p.source.name, p.start)):
        load, owner = heapq.heappop(loads)
        heapq.heappush(loads, (load + piece.size + 4096, owner))  # opening a file costs about as much as reading 4 kB
        if owner == rank:
            mine.append(piece)
    return mine
