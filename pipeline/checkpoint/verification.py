"""Reads all checksums of a checkpoint, or of all checkpoints of a run, again, and names what is damaged. Imports no torch."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.checkpoint import catalog, data_file, native, parts, stored_runs
from pipeline.checkpoint.native import FileEntry, Index
from pipeline.checkpoint.stored_runs import Run
from pipeline.common import atomic_files
from pipeline.common.errors import UserError

Progress = Callable[[int], object]
"""Called with the number of bytes that have been read since the last call."""


@dataclass(frozen=True)
class Damage:
    """Something of a checkpoint that is missing or differs from its checksum.

    Attributes:
        file: name in the folder.
        what: what is wrong.
        tensor: name of the weight; empty if the file as a whole is concerned.
        kind: "weight" or a state of the optimizer.
        elements: which elements of the tensor.
    """

    file: str
    what: str
    tensor: str = ""
    kind: str = ""
    elements: str = ""

    def __str__(self) -> str:
        where = f"{self.tensor}: {self.kind}, {self.elements}: " if self.tensor else ""
        return f"{where}{self.what} ({self.file})"


def verify(folder: Path, progress: Progress = lambda _: None) -> list[Damage]:
    """Read a checkpoint and return what is damaged; an empty list for one that is whole."""
    try:
        index = native.read_index(folder)
    except UserError as error:
        return [Damage(native.INDEX, error.violations[0].rule)]
    return _verify_files(folder, index, progress) if index.format == 1 else _Verification(folder, index, progress).damages()


def pending(run_dir: Path) -> list[str]:
    """The saves of a run that have not been finished, one line each."""
    known = catalog.read(run_dir).pending
    found = []
    for folder in sorted((run_dir / "checkpoints").glob(".step-*.partial")):
        records = len(list(folder.glob("record-*.json")))
        failures = len(list(folder.glob("failed-*.json")))
        is_known = known is not None and known.folder == folder.name
        state = f"{records} of {known.writers} records, since {known.started}" if known and is_known else f"{records} records"
        found.append(f"{folder.name}: {state}" + (f", {failures} writers failed" if failures else ""))
    if known and not (run_dir / "checkpoints" / known.folder).is_dir():
        found.append(f"{known.folder}: begun at {known.started}; its folder does not exist")
    return found


def lost(run_dir: Path) -> list[Path]:
    """Folders of checkpoints that the catalog names and that have no index."""
    folders = [catalog.folder_of(run_dir, step) for step in catalog.read(run_dir).complete]
    return [folder for folder in folders if not (folder / native.INDEX).is_file()]


def _verify_files(folder: Path, index: Index, progress: Progress) -> list[Damage]:
    """Verify the files of format 1, which have one checksum each."""
    found = []
    for file in index.files:
        try:
            atomic_files.verify(folder / file.name, file.bytes, file.xxh3, "")
        except UserError as error:
            found.append(Damage(file.name, f"{error.violations[0].rule}; {_content(folder / file.name)}"))
        progress(file.bytes)
    return found


def _content(path: Path) -> str:
    """What a damaged file of format 1 holds."""
    try:
        keys = [key for key in stored_runs.header(path)[0] if key != "__metadata__"]
    except (OSError, ValueError):
        return "its tensors are unknown"
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"it holds {', '.join(keys[:3])}{more}; this format does not tell which of them is damaged"


class _Verification:
    """The verification of a checkpoint of format 2."""

    def __init__(self, folder: Path, index: Index, progress: Progress) -> None:
        self._folder, self._index, self._progress = folder, index, progress
        self._found: list[Damage] = []

    def damages(self) -> list[Damage]:
        """Verify parts.npy, the completeness of each tensor, and then each file from its first to its last byte."""
        by_file = defaultdict(list)
        for name in self._index.tensors:
            for run in self._runs(name):
                by_file[run.file].append(run)
        if not self._found:
            self._verify_parts_file()
        for number, file in enumerate(self._index.files):
            self._verify_file(file, sorted(by_file.pop(number, []), key=lambda run: run.offset))
        return self._found

    def _add(self, file: str, what: str, run: Run | None = None, elements: tuple[int, int] | None = None) -> None:
        if run is None:
            self._found.append(Damage(file, what))
        else:
            self._found.append(Damage(file, what, run.name, run.kind, run.where(*(elements or (0, run.count)))))

    def _runs(self, name: str) -> list[Run]:
        """The runs of a weight, whose rows and digests are right and which cover all of its elements."""
        entry = self._index.tensors[name]
        try:
            runs = list(stored_runs.runs_of_tensor(self._folder, self._index, name))
        except (OSError, ValueError) as error:
            for kind in entry.dtypes:
                self._found.append(Damage(native.PARTS, f"where it is stored is not readable: {error}", name, kind, "all elements"))
            return []
        for kind in entry.dtypes:
            own = [run for run in runs if run.kind == kind]
            if (count := sum(run.count for run in own)) != prod(entry.shape):
                self._found.append(Damage(native.PARTS, "parts are missing", name, kind, f"{count:,} of {prod(entry.shape):,} elements"))
            elif f"{parts.digest_of(np.array([run.xxh3 for run in own], np.uint64)):016x}" != entry.digests[kind]:
                self._found.append(Damage(native.INDEX, "the digest of the tensor is not that of its parts", name, kind, "all elements"))
        return runs

    def _verify_parts_file(self) -> None:
        """The checksum of the whole file, if none of the rows is damaged."""
        entry, path = self._index.parts, self._folder / native.PARTS
        if entry is None or not path.is_file():
            return
        if path.stat().st_size != entry.bytes:
            self._add(native.PARTS, f"has {path.stat().st_size:,} of {entry.bytes:,} bytes")
        elif f"{xxhash.xxh3_64_intdigest(path.read_bytes()):016x}" != entry.xxh3:
            self._add(native.PARTS, "does not match its checksum")

    def _verify_file(self, file: FileEntry, runs: Sequence[Run]) -> None:
        """Verify the runs of a data file, in the order of the file."""
        path = self._folder / file.name
        try:
            handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            for run in runs:
                self._add(file.name, f"its file cannot be read: {error.strerror}", run)
            return
        try:
            size = os.fstat(handle).st_size
            if size != file.bytes:
                self._add(file.name, f"has {size:,} bytes instead of {file.bytes:,}")
            digests = self._digests(handle, file, runs)
            for run in runs:
                self._verify_run(handle, file, run, digests)
                self._progress(run.bytes)
        finally:
            os.close(handle)

    def _digests(self, handle: int, file: FileEntry, runs: Sequence[Run]) -> npt.NDArray[np.uint64] | None:
        """The block digests of a file, its last bytes; None if they are damaged."""
        count = max((run.block + self._blocks(run) for run in runs), default=0)
        found = np.frombuffer(os.pread(handle, 8 * count, max(0, file.bytes - 8 * count)), "<u8")
        if len(found) == count and f"{parts.digest_of(found):016x}" == file.xxh3:
            return found
        self._add(file.name, "the table of block digests is damaged; its parts are verified as a whole")
        return None

    def _blocks(self, run: Run) -> int:
        return parts.count_blocks(run.bytes, self._index.tensors[run.name].block_bytes)

    def _verify_run(self, handle: int, file: FileEntry, run: Run, digests: npt.NDArray[np.uint64] | None) -> None:
        """Verify the blocks of a run, or the run as a whole without their digests."""
        block_bytes = self._index.tensors[run.name].block_bytes
        found = data_file.read_digests(handle, run.offset, run.bytes, block_bytes)
        if parts.digest_of(found) == run.xxh3:
            return
        if digests is None:
            self._add(file.name, "does not match its checksum", run)
            return
        expected = digests[run.block : run.block + len(found)]
        per_block = block_bytes * run.count // max(1, run.bytes)
        for first, last in _stretches(np.flatnonzero(found != expected)):
            self._add(file.name, "does not match its checksum", run, (first * per_block, min(last * per_block, run.count)))
        if np.array_equal(found, expected):
            self._add(file.name, "is not the part that the index names", run)


def _stretches(numbers: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """First and last + 1 of each series of consecutive numbers."""
    for series in np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1):
        if len(series):
            yield int(series[0]), int(series[-1]) + 1
