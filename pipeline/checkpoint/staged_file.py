"""A data file is written from the shared memory of ranks, and what is written is verified. Imports no torch.

The bytes are those of the snapshot, finite, and not those of the previous save. An asynchronous save can write old values without any
error, for example when the copy of a tensor shares its memory, or is not made again
(https://github.com/pytorch/pytorch/issues/144657). Two rules find this:

- The sum of the words of the live tensors must be that of the bytes that are written.
- A weight that equals the previous save bit for bit, although its last update was not lost in rounding, is refused.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.checkpoint import data_file
from pipeline.checkpoint.data_file import WrittenFile
from pipeline.checkpoint.handover import LastUpdate, Member, Save, SharedPlace
from pipeline.checkpoint.parts import ITEM_SIZE, NOT_STORED
from pipeline.config.optimizer import OPTIMIZERS

#: Dtype of the words of elements of so many bytes.
WORDS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int32}
#: A float32 has so many bits after the point; an update below 8 units in the last place may be lost in rounding.
_MANTISSA, _MARGIN = 23, 3
#: A weight whose bits return by chance would need luck of so many bits.
_BITS = 40
#: Elements that are examined at a time.
_EXAMINED = 1 << 18
#: Bytes that are verified, hashed and written at a time.
_CHUNK = 4 << 20


def word_sum(data: memoryview | npt.NDArray[np.uint8], item_size: int) -> int:
    """Sum the words of whole elements, modulo 2^32, so that a sum of chunks is the sum of their sums.

    Args:
        data: bytes.
        item_size: bytes of an element.
    """
    words = np.frombuffer(data, WORDS[item_size])
    return int(np.add.reduce(words, dtype=np.int32)) & 0xFFFFFFFF


def is_finite(values: npt.NDArray[np.floating]) -> bool:
    """Whether all values are finite. A sum is finite only if they are, and is faster than to look at each; it may overflow, too."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(values.sum())) or bool(np.isfinite(values).all())


def finite_bits(data: memoryview, dtype: str) -> bool:
    """Whether the numbers in `data` are finite.

    Args:
        data: bytes of whole elements.
        dtype: its name in safetensors.
    """
    if dtype in ("F32", "F64", "F16"):
        return is_finite(np.frombuffer(data, {"F32": np.float32, "F64": np.float64, "F16": np.float16}[dtype]))
    if dtype == "BF16":  # an exponent of ones only
        exponent = np.int16(0x7F80)
        return not bool((np.frombuffer(data, np.int16) & exponent == exponent).any())
    return True


def should_have_changed(weight: npt.NDArray[np.float32], state: Sequence[npt.NDArray[np.float32]], update: LastUpdate) -> bool:
    """Whether the last update changed a weight for certain: the state of the optimizer after it tells what it was.

    An element whose update is below the resolution of its weight (a small learning rate, an expert without tokens) does not count. One
    that is moved by 2^k units in the last place returns to its old bits by chance once in 2^k; all elements together must be so improbable
    that no run sees it.

    Args:
        weight: after the update.
        state: OptimizerKind.state, likewise.
        update: the update.
    """
    if update.lr == 0 or update.updates == 0:
        return False
    bits, change_of = 0.0, OPTIMIZERS[update.optimizer.name].change
    for start in range(0, len(weight), _EXAMINED):
        w, *moments = (values[start : start + _EXAMINED].astype(np.float64) for values in (weight, *state))
        change = np.abs(change_of(moments, update.optimizer, update.lr, update.updates, update.steps))
        resolution = np.maximum(np.abs(w), change) * 2.0**-_MANTISSA
        moved = (change > resolution * 2**_MARGIN) & (change > 1e-30)
        bits += float(np.log2(change[moved] / resolution[moved]).sum())
        if bits >= _BITS:
            return True
    return False


def chunks(size: int, most: int) -> Iterator[tuple[int, int]]:
    """Divide `size` bytes: (first, last + 1) of each chunk of at most `most` bytes."""
    for start in range(0, size, most):
        yield start, min(start + most, size)


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

    def read(self, place: SharedPlace) -> Iterator[memoryview]:
        """Yield the bytes of a place; pages that were read do not count as memory of this process any more."""
        with memoryview(self._maps[place.segment]) as view:
            for first, last in chunks(place.bytes, _CHUNK):
                yield view[place.offset + first : place.offset + last]
                page = (place.offset + first) // mmap.PAGESIZE * mmap.PAGESIZE
                self._maps[place.segment].madvise(mmap.MADV_DONTNEED, page, place.offset + last - page)

    def array(self, place: SharedPlace, dtype: str) -> np.ndarray:
        """The numbers of a place, which are in F32 or BF16, in fp32."""
        if dtype == "BF16":
            bits = np.frombuffer(self._maps[place.segment], np.uint16, place.bytes // 2, place.offset)
            return (bits.astype(np.uint32) << 16).view(np.float32)
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
        weight, *state = (rank.segments.array(places[kind], part.dtypes[kind]) for kind in ("weight", *kinds))
        if should_have_changed(weight, state, save.update):
            raise ValueError(f"{part.name} equals the previous save, although its last update changed it: the copy is stale")
