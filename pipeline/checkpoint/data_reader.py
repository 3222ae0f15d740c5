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
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from numpy.lib.stride_tricks import as_strided

from pipeline.checkpoint.data_file import FileEntry
from pipeline.checkpoint.read_plan import FilePlan, Integers, Source
from pipeline.common.atomic_files import digest

Bytes = npt.NDArray[np.uint8]
Digests = npt.NDArray[np.uint64]

#: Files that are open at a time.
OPEN_FILES = 64
#: Calls of a rank that wait for the file system at a time.
THREADS = 4
#: The longest gap between block digests that is read with them, in digests.
_DIGEST_GAP = 512
#: The most buffers of one call of preadv (IOV_MAX of Linux).
_VECTORS = 1024


@dataclass(frozen=True)
class Damage:
    """Bytes of a source that are not as they were written.

    Attributes:
        source: the part and kind.
        first: first byte in the part.
        last: end in the part.
        reason: what is wrong, after the name of the file.
    """

    source: Source
    first: int
    last: int
    reason: str


@dataclass
class Counters:
    """What has been read, for logs and tests.

    Attributes:
        opened: names of files, as often as they were opened.
        calls: calls of pread.
        bytes: bytes read.
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
    """A chunk of a plan, with the open file and the checksums of the blocks of each span of the plan."""

    plan: FilePlan
    chunk: int
    handle: int
    digests: list[Digests]


class DataFiles:
    """The data files of a checkpoint. The last ones that were used stay open.

    Args:
        folder: of the checkpoint.
        files: the files, by number. One without block digests (format 1) is verified as a whole when it is first opened.
        counters: of what is read.
    """

    def __init__(self, folder: Path, files: Sequence[FileEntry], counters: Counters) -> None:
        self._folder, self._files, self._counters = folder, files, counters
        self._open: dict[int, FileIO] = {}
        self._verified: set[int] = set()
        self._buffers = threading.local()

    def read(self, plans: Sequence[FilePlan], buffers: Sequence[Bytes]) -> list[Damage]:
        """Read what the plans say into the buffers, and return what is damaged; the content of the buffers is then undefined."""
        damaged: list[Damage] = []
        with ThreadPoolExecutor(THREADS) as pool:
            for first in range(0, len(plans), OPEN_FILES):
                group = plans[first : first + OPEN_FILES]
                self._keep_open({plan.file for plan in group})
                tasks = list(self._tasks(group, damaged))
                run = pool.map if len(tasks) > 1 else map
                for found in run(partial(self._read_chunk, buffers), tasks):
                    damaged += found
        return damaged

    def _keep_open(self, files: set[int]) -> None:
        """Close files that are not needed, if too many would be open."""
        if len(files | self._open.keys()) > OPEN_FILES:
            for file in self._open.keys() - files:
                self._open.pop(file).close()

    def _tasks(self, plans: Sequence[FilePlan], damaged: list[Damage]) -> Iterator[_Task]:
        """Open each file, read its block digests, and yield the chunks."""
        for plan in plans:
            try:
                handle = self._handle(plan.file)
                digests = self._read_digests(plan, handle)
            except OSError as error:
                damaged += [Damage(source, 0, source.size, error.strerror or str(error)) for source in plan.sources]
                continue
            for chunk in range(len(plan.chunks) - 1):
                yield _Task(plan, chunk, handle, digests)

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

    def _read_digests(self, plan: FilePlan, handle: int) -> list[Digests]:
        """The checksums of the blocks of each span; none without block digests."""
        entry = self._files[plan.file]
        if not entry.blocks:
            return [np.zeros(0, np.uint64)] * len(plan.spans)
        offset = entry.bytes - 8 * entry.blocks
        ranges = np.array([_blocks_of(plan.sources[source], low, high) for low, high, source in plan.spans.tolist()])
        order = np.argsort(ranges[:, 0])
        first, last = ranges[order].T
        starts = np.flatnonzero(np.concatenate([[True], first[1:] - np.maximum.accumulate(last)[:-1] > _DIGEST_GAP]))
        found: list[Digests] = [np.zeros(0, np.uint64)] * len(ranges)
        for begin, end in zip(starts, [*starts[1:], len(order)], strict=True):
            low, high = int(first[begin]), int(last[begin:end].max())
            digests = np.zeros(high - low, "<u8")
            if self._pread(handle, [digests.data.cast("B")], offset + 8 * low) != digests.nbytes:
                raise OSError(f"ends before its block digests {low}:{high}")
            for span in order[begin:end].tolist():
                found[span] = digests[ranges[span, 0] - low : ranges[span, 1] - low]
        return found

    def _read_chunk(self, buffers: Sequence[Bytes], task: _Task) -> list[Damage]:
        """Read the spans of a chunk, verify them, and copy the pieces that were not read into their place."""
        plan, first, last = task.plan, int(task.plan.chunks[task.chunk]), int(task.plan.chunks[task.chunk + 1])
        spans = plan.spans[first:last]
        pieces = plan.pieces[slice(*np.searchsorted(plan.pieces[:, 4], (first, last)))]
        starts = np.flatnonzero(~plan.joined[first:last])  # spans from which one call reads
        position = _positions(spans, starts)
        scratch = self._scratch(int(position[-1] + spans[-1, 1] - spans[-1, 0]))
        whole = _whole(spans, pieces, first)
        places = _places(spans, position, pieces, whole, scratch, buffers)
        damaged = []
        for low, high in zip(starts.tolist(), [*starts[1:].tolist(), len(spans)], strict=True):
            vectors = _vectors(spans[low:high], position[low:high], places[low:high], scratch)
            begin, reason = int(spans[low, 0]), "ends before"
            try:
                end = begin + self._pread(task.handle, vectors, begin)
            except OSError as error:
                end, reason = begin, f"cannot be read: {error.strerror}"
            lost = [span for span in spans[low:high].tolist() if span[1] > end]
            for first_lost, last_lost, number in lost:
                source = plan.sources[number]
                damaged.append(Damage(source, max(end, first_lost) - source.offset, last_lost - source.offset, reason))
        if damaged:
            return damaged
        for number, (low, high, source) in enumerate(spans.tolist()):
            damaged += _verify(plan.sources[source], low, high, places[number], task.digests[first + number])
        copied = pieces[whole[pieces[:, 4] - first] < 0]
        span = copied[:, 4] - first
        _copy(copied, scratch, position[span] + copied[:, 0] - spans[span, 0], buffers)
        return damaged

    def _scratch(self, size: int) -> Bytes:
        """A buffer of this thread, which its next call uses again."""
        buffer: Bytes | None = getattr(self._buffers, "scratch", None)
        if buffer is None or len(buffer) < size:
            buffer = self._buffers.scratch = np.empty(size, np.uint8)
        return buffer


def _blocks_of(source: Source, low: int, high: int) -> tuple[int, int]:
    """First and last + 1 position, in the block digests of the file, of the blocks from a byte of the file to another."""
    begin = source.before - source.offset
    return source.digest + (low + begin) // source.block, source.digest + (high - 1 + begin) // source.block + 1


def _positions(spans: Integers, starts: Integers) -> Integers:
    """Where each span is in the scratch buffer: spans and gaps that one call reads are contiguous."""
    lengths = spans[np.append(starts[1:], len(spans)) - 1, 1] - spans[starts, 0]
    base = np.cumsum(lengths) - lengths
    call = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(spans))))
    positions: Integers = base[call] + spans[:, 0] - spans[starts[call], 0]
    return positions


def _whole(spans: Integers, pieces: Integers, first: int) -> Integers:
    """For each span, the piece that alone covers it, which is read into its place; -1 for none."""
    own = pieces[:, 4] - first
    whole = np.full(len(spans), -1)
    covers = (pieces[:, 0] == spans[own, 0]) & (pieces[:, 1] == spans[own, 1] - spans[own, 0])
    covers &= np.bincount(own, minlength=len(spans))[own] == 1
    whole[own[covers]] = np.flatnonzero(covers)
    return whole


def _places(
    spans: Integers, position: Integers, pieces: Integers, whole: Integers, scratch: Bytes, buffers: Sequence[Bytes]
) -> list[memoryview]:
    """The memory that each span is read into."""
    places = []
    for (low, high, _), at, piece in zip(spans.tolist(), position.tolist(), whole.tolist(), strict=True):
        if piece < 0:
            places.append(scratch[at : at + high - low].data)
        else:
            _, size, target, to, _ = pieces[piece].tolist()
            places.append(buffers[target][to : to + size].data)
    return places


def _vectors(spans: Integers, position: Integers, places: list[memoryview], scratch: Bytes) -> list[memoryview]:
    """The memory of spans that one call reads, with that of the gaps between them."""
    vectors = places[:1]
    for number in range(1, len(places)):
        if gap := int(spans[number, 0] - spans[number - 1, 1]):
            at = int(position[number])
            vectors.append(scratch[at - gap : at].data)
        vectors.append(places[number])
    return vectors


def _verify(source: Source, low: int, high: int, place: memoryview, digests: Digests) -> list[Damage]:
    """Compare the blocks of a span with their checksums; blocks in a row that differ are one damage."""
    if not len(digests):
        return []
    # The first block may be shorter, and so may the last one.
    lead = min(-(low - source.offset + source.before) % source.block, high - low)
    whole = (high - low - lead) // source.block * source.block
    ends = np.concatenate([[lead] if lead else [], np.arange(lead + source.block, lead + whole + 1, source.block)]).astype(np.int64)
    found = [xxhash.xxh3_64_intdigest(place[:lead])] if lead else []
    blocks: Any = np.frombuffer(place[lead : lead + whole], np.uint8).reshape(-1, source.block)
    found += map(xxhash.xxh3_64_intdigest, blocks)
    if lead + whole < high - low:
        found.append(xxhash.xxh3_64_intdigest(place[lead + whole :]))
        ends = np.append(ends, high - low)
    begins = np.append(0, ends[:-1])
    bad = np.flatnonzero(np.array(found, np.uint64) != digests)
    damaged = []
    for run in np.split(bad, np.flatnonzero(np.diff(bad) > 1) + 1) if len(bad) else ():
        first, last = (low - source.offset + int(byte) for byte in (begins[run[0]], ends[run[-1]]))
        damaged.append(Damage(source, first, last, "differs there from its checksum"))
    return damaged


def _copy(pieces: Integers, scratch: Bytes, at: Integers, buffers: Sequence[Bytes]) -> None:
    """Copy pieces from the scratch buffer into their place; pieces at regular distances, as those of a slice, with one call.

    Args:
        pieces: as in FilePlan.
        scratch: the buffer that they were read into.
        at: position of each piece in it.
        buffers: what they go to.
    """
    if not len(pieces):
        return
    _, size, target, to, _ = pieces.T
    step, step_to = np.diff(at), np.diff(to)
    regular = (size[1:] == size[:-1]) & (target[1:] == target[:-1])
    # A group ends before the first piece that is at another distance than the one before it.
    changes = np.flatnonzero(~(regular[1:] & regular[:-1] & (step[1:] == step[:-1]) & (step_to[1:] == step_to[:-1]))) + 1
    ends = np.append(changes, len(regular)).tolist()
    first = next_change = 0
    while first < len(pieces):
        while next_change < len(ends) - 1 and ends[next_change] <= first:
            next_change += 1
        last = ends[next_change] if first < len(regular) and regular[first] else first
        rows, length = last - first + 1, int(size[first])
        source, place = scratch[int(at[first]) :], buffers[int(target[first])][int(to[first]) :]
        if rows == 1:
            place[:length] = source[:length]
        else:
            strides = [(int(steps[first]), 1) for steps in (step, step_to)]
            values, places = (as_strided(array, (rows, length), stride) for array, stride in zip((source, place), strides, strict=True))
            places[:] = values
        first = last + 1
