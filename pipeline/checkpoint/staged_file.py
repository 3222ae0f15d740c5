"""A data file is written from the shared memory of ranks, and what is written is verified. Imports no torch."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.checkpoint import data_file
from pipeline.checkpoint.data_file import WrittenFile
from pipeline.checkpoint.handover import Member, Place, Save
from pipeline.checkpoint.parts import ITEM_SIZE, NOT_STORED
from pipeline.checkpoint.staged_checks import chunks, finite_bits, should_have_changed, word_sum
from pipeline.config.optimizer import OPTIMIZERS

#: Bytes that are verified, hashed and written at a time.
_CHUNK = 4 << 20


class NotFiniteError(ValueError):
    """A weight is not finite; its name."""


class Segments:
    """The shared memory of a rank.

    Args:
        files: file descriptors, which are closed.
        sizes: bytes of each.
    """

    def __init__(self, files: list[int], sizes: list[int]) -> None:
        self._maps = [mmap.mmap(file, size, prot=mmap.PROT_READ) for file, size in zip(files, sizes, strict=True)]
        for file in files:
            os.close(file)

    def read(self, place: Place) -> Iterator[memoryview]:
        """Yield the bytes of a place; pages that were read do not count as memory of this process any more."""
        with memoryview(self._maps[place.segment]) as view:
            for first, last in chunks(place.bytes, _CHUNK):
                yield view[place.offset + first : place.offset + last]
                page = (place.offset + first) // mmap.PAGESIZE * mmap.PAGESIZE
                self._maps[place.segment].madvise(mmap.MADV_DONTNEED, page, place.offset + last - page)

    def array(self, place: Place) -> np.ndarray:
        """The fp32 numbers of a place."""
        return np.frombuffer(self._maps[place.segment], np.float32, place.bytes // 4, place.offset)


@dataclass(frozen=True)
class Handed:
    """What a rank has handed over: who it is, its memory, and the save."""

    member: Member
    segments: Segments
    save: Save


def write_file(path: Path, handed: Sequence[Handed]) -> WrittenFile:
    """Write the data file of a rank, or of the ranks that share it, and verify what is written.

    Args:
        path: the file.
        handed: of these ranks; their parts are those of the file, in this order.

    Raises:
        OSError: it cannot be written.
        ValueError: the bytes are not those of the snapshot, not finite, or those of the previous save.
    """
    owned = [(rank, number) for rank in handed for number in range(len(rank.member.parts))]

    def read(position: int, kind: str) -> Iterator[memoryview]:
        rank, number = owned[position]
        part, place = rank.member.parts[number], rank.member.places[number][kind]
        dtype, total = part.dtypes[kind], 0
        for data in rank.segments.read(place):
            total += word_sum(data, ITEM_SIZE[dtype])
            if kind == "weight" and not finite_bits(data, dtype):
                raise NotFiniteError(part.name)
            yield data
        if total & 0xFFFFFFFF != rank.save.sums[number][kind]:
            raise ValueError(f"{kind} of {part.name} was not copied as it was when the save began: {part.key(kind)} has another sum")

    written = data_file.write(path, [rank.member.parts[number] for rank, number in owned], read)
    digests = weight_digests(written, 0, len(owned))
    start = 0
    for rank in handed:
        check_stale(rank, digests[start : start + len(rank.member.parts)])
        start += len(rank.member.parts)
    return written


def weight_digests(written: WrittenFile | None, start: int, end: int) -> np.ndarray:
    """The checksum of the weight of parts `start : end` of a file; 0 for a part without one."""
    if written is None or "weight" not in written.kinds:
        return np.zeros(end - start, np.uint64)
    places = written.places[start:end, written.kinds.index("weight")]
    return np.where(places[:, 0] == np.uint64(NOT_STORED), np.uint64(0), places[:, 2])


def check_stale(rank: Handed, digests: np.ndarray) -> None:
    """Refuse a weight that equals the previous save although its last update changed it.

    Args:
        rank: what was written.
        digests: checksum of the weight of each part.

    Raises:
        ValueError: with the name of the weight.
    """
    save = rank.save
    if save.update is None or save.previous is None:
        return
    for number in np.flatnonzero((digests == save.previous) & (digests != 0)):
        part, places = rank.member.parts[number], rank.member.places[number]
        kinds = OPTIMIZERS[save.update.optimizer.name].state
        if not {"weight", *kinds} <= part.dtypes.keys() or part.dtypes["weight"] != "F32":
            continue
        weight, *state = (rank.segments.array(places[kind]) for kind in ("weight", *kinds))
        if should_have_changed(weight, state, save.update):
            raise ValueError(f"{part.name} equals the previous save, although its last update changed it: the copy is stale")
