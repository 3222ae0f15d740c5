"""Writes one data file of a checkpoint: a safetensors file, in one sequential pass, with a checksum of each block. Imports no torch.

The file has one tensor for each part and kind (Part.key), kind by kind, and the tensor `block_digests` (U64) at its end: the xxh3-64 of
every block, in the order of the file. It is needed to read parts of the file; other readers of safetensors ignore it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.checkpoint.parts import ITEM_SIZE, NOT_STORED, Part, count_blocks, digest_of

#: Name of the last tensor of a file.
BLOCK_DIGESTS = "block_digests"
#: Bytes that are hashed and then written, while they are in the processor's cache.
_PIECE = 4 << 20

#: Called with the number of a part and a kind; yields its bytes in order, in buffers of any size, of which one is used at a time.
Read = Callable[[int, str], Iterable[memoryview]]


@dataclass(frozen=True)
class FileEntry:
    """A data file of a checkpoint.

    Attributes:
        name: of the file in the folder of the checkpoint.
        xxh3: checksum in hexadecimal: of its block digests (format 2), or of the whole file (format 1).
        blocks: number of its block digests, which are its last bytes; 0 in format 1.
    """

    name: str
    bytes: int
    xxh3: str
    blocks: int = 0


@dataclass(frozen=True)
class WrittenFile:
    """A file that has been written, and where its parts are.

    Attributes:
        entry: for the index.
        kinds: the kinds that at least one part has.
        places: uint64 (parts, kinds, 3): the offset in the file, the position of the first block in the block digests, and the checksum of
            the part's block digests; NOT_STORED and zeros for a kind that the part does not have.
    """

    entry: FileEntry
    parts: list[Part]
    kinds: list[str]
    places: npt.NDArray[np.uint64]


@dataclass(frozen=True)
class _Tensor:
    """A part and kind in the file: numbers of both, offset after the header, bytes, and position of its first block."""

    part: int
    kind: int
    offset: int
    bytes: int
    block: int


def write(path: Path, parts: Sequence[Part], read: Read) -> WrittenFile:
    """Write a data file and flush it to the disk. Memory holds no more than `read` yields, and 8 bytes for each block.

    Args:
        path: the file; it replaces an older one.
        read: yields the bytes of a part and kind; called once for each that is stored, in the order of the file.

    Raises:
        OSError: the file cannot be written (disk full, quota); an incomplete file is left.
        ValueError: `read` yields more or fewer bytes than the part has.
    """
    file = DataFile(path, parts)
    file.create()
    return file.finish(file.write_parts(range(len(parts)), read))


class DataFile:
    """A data file that one or several processes of a node write together: one creates it, each writes its parts, one finishes it.

    Attributes:
        kinds: the kinds that at least one part has.
    """

    def __init__(self, path: Path, parts: Sequence[Part]) -> None:
        self.path, self._parts = path, list(parts)
        self.kinds = list(dict.fromkeys(kind for part in parts for kind in part.dtypes))
        self._header, self._tensors, self._blocks = _layout(parts, self.kinds)

    def create(self) -> None:
        """Write the header; an older file is replaced. Errors as of `write`."""
        with _opened(self.path, os.O_CREAT | os.O_TRUNC) as handle:
            _write_at(handle, memoryview(self._header), 0)

    def write_parts(self, numbers: Iterable[int], read: Read) -> dict[tuple[int, str], npt.NDArray[np.uint64]]:
        """Write parts and flush them to the disk; arguments and errors as of `write`.

        Returns:
            (number of the part, kind) -> the checksums of its blocks.
        """
        chosen = set(numbers)
        digests = {}
        with _opened(self.path) as handle:
            for tensor in self._tensors:
                if tensor.part in chosen:
                    part, kind = self._parts[tensor.part], self.kinds[tensor.kind]
                    place = len(self._header) + tensor.offset
                    digests[tensor.part, kind] = _write_tensor(handle, place, part, kind, read(tensor.part, kind))
        return digests

    def finish(self, digests: Mapping[tuple[int, str], npt.NDArray[np.uint64]]) -> WrittenFile:
        """Write the checksums of the blocks of all parts, as write_parts returns them; this ends the file.

        Raises:
            OSError: as of `write`.
        """
        places = np.zeros((len(self._parts), len(self.kinds), 3), np.uint64)
        places[:, :, 0] = NOT_STORED
        in_order = [np.zeros(0, np.uint64)]
        end = 0
        for tensor in self._tensors:
            block_digests = digests[tensor.part, self.kinds[tensor.kind]]
            in_order.append(block_digests)
            places[tensor.part, tensor.kind] = (len(self._header) + tensor.offset, tensor.block, digest_of(block_digests))
            end = tensor.offset + tensor.bytes
        every = np.concatenate(in_order)
        assert len(every) == self._blocks, f"{self.path}: checksums of {len(every)} of {self._blocks} blocks"
        last = bytes(-end % 8) + every.astype("<u8").tobytes()
        with _opened(self.path) as handle:
            _write_at(handle, memoryview(last), len(self._header) + end)
        entry = FileEntry(self.path.name, len(self._header) + end + len(last), f"{digest_of(every):016x}", self._blocks)
        return WrittenFile(entry, self._parts, self.kinds, places)


@contextmanager
def _opened(path: Path, flags: int = 0) -> Iterator[int]:
    """Open a file for writing, and flush it to the disk at the end."""
    handle = os.open(path, os.O_WRONLY | flags, 0o666)
    try:
        yield handle
        os.fsync(handle)
    finally:
        os.close(handle)


def _layout(parts: Sequence[Part], kinds: Sequence[str]) -> tuple[bytes, list[_Tensor], int]:
    """Return the header of the file, its tensors in order, and the number of blocks.

    Elements of more bytes come first: every tensor is then aligned to its elements, which PyTorch requires when it maps a file.
    """
    stored = [(p, k) for k, kind in enumerate(kinds) for p, part in enumerate(parts) if kind in part.dtypes]
    stored.sort(key=lambda entry: -ITEM_SIZE[parts[entry[0]].dtypes[kinds[entry[1]]]])
    tensors: list[_Tensor] = []
    content: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = blocks = 0
    for p, k in stored:
        part, kind = parts[p], kinds[k]
        tensors.append(_Tensor(p, k, end, part.bytes(kind), blocks))
        content[part.key(kind)] = {"dtype": part.dtypes[kind], "shape": [part.count], "data_offsets": [end, end + part.bytes(kind)]}
        end += part.bytes(kind)
        blocks += count_blocks(part.bytes(kind), part.block_bytes, part.before(kind))
    assert len(content) == len(stored) + 1, "the same run of a weight is stored twice"
    if padding := -end % 8:
        content["padding"] = {"dtype": "U8", "shape": [padding], "data_offsets": [end, end + padding]}
    first = end + padding
    content[BLOCK_DIGESTS] = {"dtype": "U64", "shape": [blocks], "data_offsets": [first, first + 8 * blocks]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, tensors, blocks


def _write_tensor(handle: int, offset: int, part: Part, kind: str, buffers: Iterable[memoryview]) -> npt.NDArray[np.uint64]:
    """Write the bytes of a part and kind at an offset, and return the checksums of its blocks.

    Raises:
        ValueError: the buffers do not have the bytes of the part.
    """
    hasher = BlockHasher(part.block_bytes, part.before(kind))
    written = 0
    for buffer in buffers:
        for piece in _pieces(buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer):
            hasher.update(piece)
            _write_at(handle, piece, offset + written)
            written += len(piece)
    if written != part.bytes(kind):
        raise ValueError(f"{part.key(kind)}: {written} bytes instead of {part.bytes(kind)}")
    return hasher.digests()


def _pieces(buffer: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(buffer), _PIECE):
        yield buffer[start : start + _PIECE]


def _write_at(handle: int, data: memoryview, offset: int) -> None:
    """Write all bytes; one call of os.pwrite may write fewer."""
    while data:
        written = os.pwrite(handle, data, offset)
        data, offset = data[written:], offset + written


class BlockHasher:
    """The xxh3-64 of each block of a sequence of bytes that comes in buffers of any size.

    Args:
        block_bytes: bytes of a block; the last one may be shorter.
        before: bytes by which the first block is shorter.
    """

    def __init__(self, block_bytes: int, before: int) -> None:
        self._block = block_bytes
        self._digests: list[int] = []
        self._open = xxhash.xxh3_64()  # of a block that began in an earlier buffer
        self._filled = before
        self._empty = True

    def update(self, data: memoryview) -> None:
        """Add bytes."""
        self._empty = self._empty and not data
        begin = 0
        if self._filled:
            begin = min(self._block - self._filled, len(data))
            self._add(data[:begin])
        whole = begin + (len(data) - begin) // self._block * self._block
        hash_of, block = xxhash.xxh3_64_intdigest, self._block
        self._digests += [hash_of(data[start : start + block]) for start in range(begin, whole, block)]
        if whole < len(data):
            self._add(data[whole:])

    def _add(self, data: memoryview) -> None:
        self._open.update(data)
        self._filled += len(data)
        if self._filled == self._block:
            self._finish()

    def _finish(self) -> None:
        self._digests.append(self._open.intdigest())
        self._open.reset()
        self._filled = 0

    def digests(self) -> npt.NDArray[np.uint64]:
        """The checksums of all blocks; no bytes can be added afterwards."""
        if self._filled and not self._empty:
            self._finish()
        return np.array(self._digests, np.uint64)


def header_of(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, and the offset of its first tensor.

    Raises:
        ValueError: it is no header.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as handle:
        size = int.from_bytes(handle.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError("its header is damaged")
        content: dict[str, Any] = json.loads(handle.read(size))
    return content, 8 + size


def read_digests(handle: int, offset: int, size: int, block_bytes: int, before: int) -> npt.NDArray[np.uint64]:
    """Read bytes of an open file and return the checksums of their blocks; missing bytes of a short file are left out."""
    hasher, end = BlockHasher(block_bytes, before), offset + size
    while offset < end and (data := os.pread(handle, min(_PIECE, end - offset), offset)):
        hasher.update(memoryview(data))
        offset += len(data)
    digests = hasher.digests()
    missing = count_blocks(size, block_bytes, before) - len(digests)
    return np.concatenate([digests, np.zeros(missing, np.uint64)]) if missing > 0 else digests
