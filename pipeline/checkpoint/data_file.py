"""Writes one data file of a checkpoint: a safetensors file, in one sequential pass, with a checksum of each block. Imports no torch.

The file has one tensor for each part and kind (Part.key), kind by kind, and the tensor `block_digests` (U64) at its end: the xxh3-64 of
every block, in the order of the file. It is needed to read parts of the file; other readers of safetensors ignore it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.checkpoint.parts import ITEM_SIZE, NOT_STORED, Part, count_blocks, digest_of

#: Name of the last tensor of a file.
BLOCK_DIGESTS = "block_digests"
#: Bytes that are hashed and then written, while they are in the processor's cache.
_PIECE = 4 << 20


@dataclass(frozen=True)
class FileEntry:
    """A data file of a checkpoint.

    Attributes:
        name: of the file in the folder of the checkpoint.
        bytes: its size.
        xxh3: checksum in hexadecimal: of its block digests (format 2), or of the whole file (format 1).
    """

    name: str
    bytes: int
    xxh3: str


@dataclass(frozen=True)
class WrittenFile:
    """A file that has been written, and where its parts are.

    Attributes:
        entry: for the index.
        parts: the parts of the file.
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


def write(path: Path, parts: Sequence[Part], read: Callable[[int, str], Iterable[memoryview]]) -> WrittenFile:
    """Write a data file and flush it to the disk. Memory holds no more than `read` yields, and 8 bytes for each block.

    Args:
        path: the file; it replaces an older one.
        parts: what the file stores.
        read: called with the number of a part and a kind, once for each that is stored; yields its bytes in order, in buffers of any size.
            A buffer is not used after the next one is requested.

    Raises:
        OSError: the file cannot be written (disk full, quota); an incomplete file is left.
        ValueError: `read` yields more or fewer bytes than the part has.
    """
    kinds = list(dict.fromkeys(kind for part in parts for kind in part.dtypes))
    header, tensors, blocks = _layout(parts, kinds)
    digests = np.zeros(blocks, "<u8")
    places = np.zeros((len(parts), len(kinds), 3), np.uint64)
    places[:, :, 0] = NOT_STORED
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        _write_all(handle, memoryview(header))
        end = 0
        for tensor in tensors:
            part, kind = parts[tensor.part], kinds[tensor.kind]
            own = digests[tensor.block : tensor.block + count_blocks(tensor.bytes, part.block_bytes)]
            _write_tensor(handle, part.key(kind), read(tensor.part, kind), tensor.bytes, part.block_bytes, own)
            places[tensor.part, tensor.kind] = (len(header) + tensor.offset, tensor.block, digest_of(own))
            end = tensor.offset + tensor.bytes
        _write_all(handle, memoryview(bytes(-end % 8) + digests.tobytes()))
        os.fsync(handle)
    finally:
        os.close(handle)
    size = len(header) + end + -end % 8 + digests.nbytes
    return WrittenFile(FileEntry(path.name, size, f"{digest_of(digests):016x}"), list(parts), kinds, places)


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
        blocks += count_blocks(part.bytes(kind), part.block_bytes)
    assert len(content) == len(stored) + 1, "the same run of a weight is stored twice"
    if padding := -end % 8:
        content["padding"] = {"dtype": "U8", "shape": [padding], "data_offsets": [end, end + padding]}
    first = end + padding
    content[BLOCK_DIGESTS] = {"dtype": "U64", "shape": [blocks], "data_offsets": [first, first + 8 * blocks]}
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, tensors, blocks


def _write_tensor(
    handle: int, key: str, buffers: Iterable[memoryview], size: int, block_bytes: int, digests: npt.NDArray[np.uint64]
) -> None:
    """Write the bytes of a tensor and set the checksums of its blocks.

    Raises:
        ValueError: the buffers do not have `size` bytes together.
    """
    hasher = BlockHasher(block_bytes)
    written = 0
    for buffer in buffers:
        for piece in _pieces(buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer):
            hasher.update(piece)
            _write_all(handle, piece)
            written += len(piece)
    if written != size:
        raise ValueError(f"{key}: {written} bytes instead of {size}")
    digests[:] = hasher.digests()


def _pieces(buffer: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(buffer), _PIECE):
        yield buffer[start : start + _PIECE]


def _write_all(handle: int, data: memoryview) -> None:
    """Write all bytes; one call of os.write may write fewer."""
    while data:
        data = data[os.write(handle, data) :]


class BlockHasher:
    """The xxh3-64 of each block of a sequence of bytes that comes in buffers of any size.

    Args:
        block_bytes: bytes of a block; the last one may be shorter.
    """

    def __init__(self, block_bytes: int) -> None:
        self._block = block_bytes
        self._digests: list[int] = []
        self._open = xxhash.xxh3_64()  # of a block that began in an earlier buffer
        self._filled = 0

    def update(self, data: memoryview) -> None:
        """Add bytes."""
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
        """Add bytes of one block."""
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
        if self._filled:
            self._finish()
        return np.array(self._digests, np.uint64)


def damaged_blocks(handle: int, offset: int, size: int, block_bytes: int, digests: npt.NDArray[np.uint64]) -> list[int]:
    """Read bytes of an open file, and return the numbers of the blocks that differ from their checksums.

    Args:
        handle: the file.
        offset: of the first byte.
        size: number of bytes.
        block_bytes: bytes of a block.
        digests: of the blocks.
    """
    found = read_digests(handle, offset, size, block_bytes)
    return [int(number) for number in np.flatnonzero(found != digests)]


def read_digests(handle: int, offset: int, size: int, block_bytes: int) -> npt.NDArray[np.uint64]:
    """Read bytes of an open file and return the checksums of their blocks; missing bytes of a short file are left out."""
    hasher, end = BlockHasher(block_bytes), offset + size
    while offset < end and (data := os.pread(handle, min(_PIECE, end - offset), offset)):
        hasher.update(memoryview(data))
        offset += len(data)
    found = hasher.digests()
    missing = count_blocks(size, block_bytes) - len(found) if size else 0
    return np.concatenate([found, np.zeros(missing, np.uint64)]) if missing > 0 else found
