"""Reads planned bytes of the data files of a checkpoint into buffers and verifies each block that is read. Imports no torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from io import FileIO
from pathlib import Path

import numpy as np

from pipeline.checkpoint import read_chunk
from pipeline.checkpoint.data_file import FileEntry
from pipeline.checkpoint.read_chunk import BadBytes, Bytes, Digests
from pipeline.checkpoint.read_plan import FilePlan, Integers
from pipeline.common.atomic_files import digest

#: Files that are open at a time.
OPEN_FILES = 64
#: Calls of a rank that wait for the file system at a time.
THREADS = 4
#: The longest gap between block digests that is read with them, in digests.
_DIGEST_GAP = 512
#: The most buffers of one call of preadv (IOV_MAX of Linux).
_VECTORS = 1024


@dataclass
class Counters:
    """What has been read, for logs and tests.

    Attributes:
        opened: names of files, as often as they were opened.
        calls: calls of pread.
        wanted: bytes that were asked for.
    """

    opened: list[str] = field(default_factory=list)
    calls: int = 0
    bytes: int = 0
    wanted: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, size: int) -> None:
        """Count one call."""
        with self._lock:
            self.calls += 1
            self.bytes += size


@dataclass(frozen=True)
class _Task:
    """A chunk of a plan, with the open file, the checksums of the blocks of all spans of the plan, and the first one of each span."""

    plan: FilePlan
    chunk: int
    handle: int
    digests: Digests
    starts: Integers


class DataFiles:
    """The data files of a checkpoint. The last ones that were used stay open.

    Args:
        files: the files, by number. One without block digests (format 1) is verified as a whole when it is first opened.
    """

    def __init__(self, folder: Path, files: Sequence[FileEntry], counters: Counters) -> None:
        self._folder, self._files, self._counters = folder, files, counters
        self._open: dict[int, FileIO] = {}
        self._verified: set[int] = set()
        self._buffers = threading.local()

    def read(self, plans: Sequence[FilePlan], buffers: Sequence[Bytes]) -> list[BadBytes]:
        """Read what the plans say into the buffers, and return what is damaged; the content of the buffers is then undefined."""
        damaged: list[BadBytes] = []
        with ThreadPoolExecutor(THREADS) as pool:
            for first in range(0, len(plans), OPEN_FILES):
                group = plans[first : first + OPEN_FILES]
                self._keep_open({plan.file for plan in group})
                tasks = list(self._tasks(group, damaged))
                run = pool.map if len(tasks) > 1 else map
                for chunk_damage in run(partial(self._read_chunk, buffers), tasks):
                    damaged += chunk_damage
        return damaged

    def _keep_open(self, files: set[int]) -> None:
        """Close files that are not needed, if too many would be open."""
        if len(files | self._open.keys()) > OPEN_FILES:
            for file in self._open.keys() - files:
                self._open.pop(file).close()

    def _tasks(self, plans: Sequence[FilePlan], damaged: list[BadBytes]) -> Iterator[_Task]:
        """Open each file, read its block digests, and yield the chunks."""
        for plan in plans:
            try:
                handle = self._handle(plan.file)
                digests, starts = self._read_digests(plan, handle)
            except OSError as error:
                damaged += [BadBytes(source, 0, source.size, error.strerror or str(error)) for source in plan.sources]
                continue
            for chunk in range(len(plan.chunks) - 1):
                yield _Task(plan, chunk, handle, digests, starts)

    def _handle(self, file: int) -> int:
        """Open a file, if it is not open.

        Raises:
            OSError: it is missing, or is not the file that was written.
        """
        if file in self._open:
            return self._open[file].fileno()
        entry = self._files[file]
        path = self._folder / entry.name
        size = path.stat().st_size
        if size != entry.bytes:
            raise OSError(f"is truncated or overwritten: {size} bytes, expected {entry.bytes}")
        if not entry.blocks and file not in self._verified:
            self._counters.add(size)
            if digest(path) != entry.xxh3:
                raise OSError("is corrupt: its checksum differs from the recorded one")
            self._verified.add(file)
        self._open[file] = FileIO(path)
        self._counters.opened.append(entry.name)
        return self._open[file].fileno()

    def _pread(self, handle: int, vectors: list[memoryview], offset: int) -> int:
        """Fill the vectors from an offset of a file; returns the number of bytes, fewer only at the end of the file."""
        total = 0
        while vectors:
            size = os.preadv(handle, vectors[:_VECTORS], offset + total)
            self._counters.add(size)
            if size == 0:
                break
            total += size
            while vectors and size >= len(vectors[0]):
                size -= len(vectors.pop(0))
            if size:
                vectors[0] = vectors[0][size:]
        return total

    def _read_digests(self, plan: FilePlan, handle: int) -> tuple[Digests, Integers]:
        """The checksums of the blocks of all spans, and the first one of each span and the end; empty without block digests.

        Raises:
            OSError: they cannot be read.
        """
        entry = self._files[plan.file]
        if not entry.blocks:
            return np.zeros(0, np.uint64), np.zeros(len(plan.spans) + 1, np.int64)
        ranges = plan.digests()
        starts = np.append(0, np.cumsum(ranges[:, 1] - ranges[:, 0]))
        digests = np.empty(starts[-1], "<u8")
        order = np.argsort(ranges[:, 0])
        first, last = ranges[order].T
        groups = np.flatnonzero(np.concatenate([[True], first[1:] - np.maximum.accumulate(last)[:-1] > _DIGEST_GAP]))
        for begin, end in zip(groups, [*groups[1:], len(order)], strict=True):
            low, high = int(first[begin]), int(last[begin:end].max())
            near = np.empty(high - low, "<u8")
            if self._pread(handle, [near.data.cast("B")], entry.bytes - 8 * (entry.blocks - low)) != near.nbytes:
                raise OSError(f"ends before its block digests {low}:{high}")
            for span in order[begin:end].tolist():
                digests[starts[span] : starts[span + 1]] = near[ranges[span, 0] - low : ranges[span, 1] - low]
        return digests, starts

    def _read_chunk(self, buffers: Sequence[Bytes], task: _Task) -> list[BadBytes]:
        """Read the spans of a chunk, verify them, and copy the pieces that were not read into their place."""
        plan, first, last = task.plan, int(task.plan.chunks[task.chunk]), int(task.plan.chunks[task.chunk + 1])
        spans = plan.spans[first:last]
        pieces = plan.pieces[slice(*np.searchsorted(plan.pieces[:, 4], (first, last)))]
        starts = np.flatnonzero(~plan.joined[first:last])  # spans from which one call reads
        position = read_chunk.positions(spans, starts)
        scratch = self._scratch(int(position[-1] + spans[-1, 1] - spans[-1, 0]))
        whole = read_chunk.whole(spans, pieces, first)
        places = read_chunk.places(spans, position, pieces, whole, scratch, buffers)
        damaged = []
        for low, high in zip(starts.tolist(), [*starts[1:].tolist(), len(spans)], strict=True):
            vectors = read_chunk.vectors(spans[low:high], position[low:high], places[low:high], scratch)
            begin, reason = int(spans[low, 0]), "ends before"
            try:
                end = begin + self._pread(task.handle, vectors, begin)
            except OSError as error:
                end, reason = begin, f"cannot be read: {error.strerror}"
            lost = [span for span in spans[low:high].tolist() if span[1] > end]
            for first_lost, last_lost, number in lost:
                source = plan.sources[number]
                damaged.append(BadBytes(source, max(end, first_lost) - source.offset, last_lost - source.offset, reason))
        if damaged:
            return damaged
        if len(task.digests):
            expected = task.digests[task.starts[first] : task.starts[last]]
            damaged = read_chunk.verify(plan, first, last, places, expected)
        copied = pieces[whole[pieces[:, 4] - first] < 0]
        span = copied[:, 4] - first
        read_chunk.copy(copied, scratch, position[span] + copied[:, 0] - spans[span, 0], buffers)
        return damaged

    def _scratch(self, size: int) -> Bytes:
        """A buffer of this thread, which its next call uses again."""
        buffer: Bytes | None = getattr(self._buffers, "scratch", None)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers.scratch = np.empty(size, np.uint8)
        return buffer
