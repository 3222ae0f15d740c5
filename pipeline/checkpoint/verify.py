"""Reads a checkpoint again, compares every byte with its checksum, and names what is damaged. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.checkpoint import catalog, native, stored_runs
from pipeline.checkpoint.data_file import FileEntry, header_of, read_digests
from pipeline.checkpoint.native import Index, TensorEntry
from pipeline.checkpoint.parts import Part, digest_of
from pipeline.checkpoint.stored_runs import StoredRun
from pipeline.common import atomic_files
from pipeline.common.errors import UserError

#: Files that are read at a time; reading and hashing release the interpreter.
_THREADS = 8

Progress = Callable[[int], object]
"""Called with the number of bytes that have been read since the last call."""


@dataclass(frozen=True)
class Damage:
    """Something of a checkpoint that is missing or differs from its checksum.

    Attributes:
        file: name in the folder.
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
        where = f"{self.kind} of {self.tensor}, {self.elements}: " if self.tensor else ""
        return f"{self.file}: {where}{self.what}"


def verify(folder: Path, progress: Progress = lambda _: None) -> list[Damage]:
    """Read a checkpoint and return what is damaged; an empty list for one that is whole."""
    try:
        index = native.read_index(folder)
    except UserError as error:
        return [Damage(native.INDEX, error.violations[0].rule)]
    return list(_format_1(folder, index, progress) if index.format == 1 else _format_2(folder, index, progress))


def check_sizes(folder: Path, index: Index) -> None:
    """Refuse a checkpoint with a file that is missing or has another size than its index says. Reads no file.

    Raises:
        DamagedCheckpointError: names the first such file, and counts the others.
    """
    expected = {file.name: file.bytes for file in index.files} | ({} if index.parts is None else {native.PARTS: index.parts.bytes})
    wrong = [
        (name, "is missing" if actual is None else f"has {actual:,} bytes, expected {size:,}")
        for name, size in expected.items()
        if (actual := atomic_files.size_of(folder / name)) != size
    ]
    if wrong:
        name, rule = wrong[0]
        more = f"; {len(wrong) - 1:,} more files are missing or of another size" if len(wrong) > 1 else ""
        raise native.unreadable(folder, folder / name, rule + more)


def lost(run_dir: Path) -> list[Path]:
    """Folders of checkpoints that the catalog names and that do not exist."""
    folders = [catalog.folder_of(run_dir, step) for step in catalog.read(run_dir).complete]
    return [folder for folder in folders if not folder.is_dir()]


def pending(run_dir: Path) -> list[str]:
    """The saves of a run that have not been finished, one line each."""
    known = catalog.read(run_dir).pending
    lines = []
    for folder in sorted((run_dir / "checkpoints").glob(".step-*.partial")):
        records, failures = (len(list(folder.glob(f"{name}-*.json"))) for name in ("record", "failed"))
        of_all = f" of {known.writers} records, since {known.started}" if known and known.folder == folder.name else " records"
        lines.append(f"{folder.name}: {records}{of_all}" + (f", {failures} writers failed" if failures else ""))
    if known and not (run_dir / "checkpoints" / known.folder).is_dir():
        lines.append(f"{known.folder}: since {known.started}; its folder does not exist")
    return lines


def _format_1(folder: Path, index: Index, progress: Progress) -> Iterator[Damage]:
    """Verify the files of format 1, which have one checksum each."""
    for file in index.files:
        try:
            atomic_files.verify(folder / file.name, file.bytes, file.xxh3, "")
        except UserError as error:
            yield Damage(file.name, f"{error.violations[0].rule}; {_content(folder / file.name)}")
        progress(file.bytes)


def _content(path: Path) -> str:
    try:
        keys = [key for key in header_of(path)[0] if key != "__metadata__"]
    except (OSError, ValueError):
        return "its tensors are unknown"
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"it holds {', '.join(keys[:3])}{more}; format 1 does not tell which of them is damaged"


def _format_2(folder: Path, index: Index, progress: Progress) -> Iterator[Damage]:
    """Verify parts.npy and the completeness of each tensor, and then each file from its first byte to its last."""
    runs: list[StoredRun] = []
    parts_are_right = True
    for name, entry in index.tensors.items():
        try:
            stored = list(stored_runs.runs_of_tensor(folder, index, name))
        except (OSError, ValueError) as error:
            parts_are_right = False
            yield from (Damage(native.PARTS, f"where they are stored is unknown: {error}", name, k, "all elements") for k in entry.dtypes)
            continue
        runs += stored
        yield from (damage for kind in entry.dtypes if (damage := _tensor(name, kind, entry, [run for run in stored if run.kind == kind])))
    if parts_are_right and index.parts is not None:
        content = (folder / native.PARTS).read_bytes()
        if (len(content), xxhash.xxh3_64_hexdigest(content)) != (index.parts.bytes, index.parts.xxh3):
            yield Damage(native.PARTS, "its header or its end differs from its checksum")
    yield from damages(folder, index.files, index.tensors, runs, progress)


def _tensor(name: str, kind: str, entry: TensorEntry, runs: Sequence[StoredRun]) -> Damage | None:
    """What the index and the parts of a tensor contradict each other in."""
    if (count := sum(run.count for run in runs)) != prod(entry.shape):
        return Damage(native.PARTS, f"{count:,} of {prod(entry.shape):,} elements are stored", name, kind, "all elements")
    if f"{digest_of(np.array([run.xxh3 for run in runs], np.uint64)):016x}" != entry.digests[kind]:
        return Damage(native.INDEX, "the digest of the tensor is not that of its parts", name, kind, "all elements")
    return None


def damages(
    folder: Path,
    files: Sequence[FileEntry],
    tensors: Mapping[str, TensorEntry],
    runs: Sequence[StoredRun],
    progress: Progress = lambda _: None,
) -> Iterator[Damage]:
    """Read every byte of the data files of a checkpoint of format 2, and yield what is missing or changed.

    Args:
        files: its files, in the order of the index.
        runs: what the files hold, in any order.
        progress: reported to after each file.
    """
    by_file: list[list[StoredRun]] = [[] for _ in files]
    for run in runs:
        by_file[run.file].append(run)

    def of_file(pair: tuple[FileEntry, list[StoredRun]]) -> list[Damage]:
        return list(_file(folder / pair[0].name, pair[0], tensors, sorted(pair[1], key=lambda run: run.block)))

    with ThreadPoolExecutor(_THREADS) as pool:
        for file, damaged in zip(files, pool.map(of_file, zip(files, by_file, strict=True)), strict=True):
            progress(atomic_files.size_of(folder / file.name) or 0)
            yield from damaged


def _file(path: Path, file: FileEntry, tensors: Mapping[str, TensorEntry], runs: Sequence[StoredRun]) -> Iterator[Damage]:
    """What is missing or changed of one file, whose runs are given in its order."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        yield from (_damage(file, f"cannot be read: {error.strerror}", run) for run in runs)
        return
    try:
        if (size := os.fstat(handle).st_size) != file.bytes:
            yield Damage(file.name, f"has {size:,} bytes, expected {file.bytes:,}")
        try:
            _check_header(path, runs)
        except (OSError, ValueError, KeyError, TypeError) as error:
            yield Damage(file.name, f"its header is damaged, which only other readers of safetensors need: {error}")
        stored = os.pread(handle, 8 * file.blocks, max(0, file.bytes - 8 * file.blocks))
        table = np.frombuffer(stored[: len(stored) // 8 * 8], "<u8")  # a short file may end within a digest
        known = len(table) == file.blocks and f"{digest_of(table):016x}" == file.xxh3
        if not known and size == file.bytes:
            yield Damage(file.name, "its block digests are damaged; its parts are verified as a whole")
        for run in runs:
            yield from _run(handle, file, run, tensors[run.name].block_bytes, table if known else None)
    finally:
        os.close(handle)


def _check_header(path: Path, runs: Sequence[StoredRun]) -> None:
    """Compare the header of a file with the runs that it has to describe.

    Raises:
        ValueError, KeyError: it describes them otherwise, or is no header.
    """
    content, first = header_of(path)
    for run in runs:
        key = Part(run.name, run.shape, run.box, run.start, run.count, 1, {}).key(run.kind)
        if content[key] != {"dtype": run.dtype, "shape": [run.count], "data_offsets": [run.offset - first, run.offset - first + run.bytes]}:
            raise ValueError(key)


def _run(handle: int, file: FileEntry, run: StoredRun, block_bytes: int, table: npt.NDArray[np.uint64] | None) -> Iterator[Damage]:
    """Verify the blocks of a run, or the run as a whole if the block digests are not known."""
    before = run.start * run.item_size % block_bytes
    digests = read_digests(handle, run.offset, run.bytes, block_bytes, before)
    if digest_of(digests) == run.xxh3:
        return
    changed = np.zeros(0, np.int64) if table is None else np.flatnonzero(digests != table[run.block : run.block + len(digests)])
    for first, last in _series(changed):
        begin, end = ((number * block_bytes - before) // run.item_size for number in (first, last))
        yield _damage(file, "other bytes than were saved", run, max(begin, 0), min(end, run.count))
    if not len(changed):
        yield _damage(file, "other bytes than were saved", run)


def _damage(file: FileEntry, problem: str, run: StoredRun, first: int = 0, last: int | None = None) -> Damage:
    """Damage of elements `first : last` of a run, or of all of them."""
    return Damage(file.name, problem, run.name, run.kind, run.where(first, run.count if last is None else last))


def _series(numbers: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """First and last + 1 of each series of consecutive numbers."""
    for series in np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1) if len(numbers) else ():
        yield int(series[0]), int(series[-1]) + 1
