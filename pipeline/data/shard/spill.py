"""Intermediate files between reading and writing: one file per part, with its documents in shuffled order and an index behind them.

The documents of a part are numbered from 0 in the order of the input, so that a number does not depend on the shuffle or on the parts.

One file per part and shard would be simpler, but thousands of parts and shards would make millions of files. A part has a single file: a
rank can keep the files of all its parts open, and opens each of them once.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import numpy as np
import orjson

SUFFIX = ".spill"

FORMAT = 5
"""Version of the files, of the completion records, and of the built-in classifier of languages.

An interrupted run of another version cannot be continued.
"""

RUN_BYTES = 128 << 20
"""Bytes of documents that are collected in memory before a sorted run is written. Usually a part has one run."""

_HEAD = struct.Struct("<II")  # bytes of metadata, bytes of text


def row_type(permutations: int) -> np.dtype:
    """The dtype of the index row of a document.

    Fields: number of the document in the part, offset in the file, bytes of text, language, length in characters, score (NaN for none),
    hashes of text and URL, and signature.
    """
    fields = [("number", "<u4"), ("position", "<u8"), ("size", "<u4"), ("language", "S16"), ("length", "<i4"), ("score", "<f4")]
    return np.dtype([*fields, ("exact", "<u8", 2), ("url", "<u8", 2), ("minhash", "<u4", permutations)])


class Spill:
    """Writes the documents of one part.

    The file contains the runs, then the index: the shuffle keys and the rows in shuffled order, the row of every document by its number,
    and the band hashes by number, one band after the other.

    Attributes:
        runs: bounds of the sorted runs, in rows.
        index: offset of the index.
    """

    def __init__(self, handle: IO[bytes], row: np.dtype, bands: int) -> None:
        self._handle, self._row, self._bands = handle, row, bands
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._records: list[bytes | bytearray] = []
        self._collected = self.index = 0
        self._keys: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        self._hashes: list[np.ndarray] = []
        self.runs: list[int] = [0]

    def add(
        self, keys: np.ndarray, metadata: Sequence[dict[str, Any]], texts: Sequence[bytes | bytearray], rows: np.ndarray, hashes: np.ndarray
    ) -> None:
        """Add documents.

        Args:
            keys: (documents,) uint64 shuffle keys.
            rows: (documents,) of row_type; this method sets number, position and size.
            hashes: (bands, documents) uint64.
        """
        rows["size"] = [len(text) for text in texts]
        for fields, text in zip(metadata, texts, strict=True):
            meta = orjson.dumps(fields, default=str)
            self._records += [_HEAD.pack(len(meta), len(text)) + meta, text]
            self._collected += _HEAD.size + len(meta) + len(text)
        self._pending.append((keys, rows))
        self._hashes.append(hashes)
        if self._collected >= RUN_BYTES:
            self._write_run()

    def close(self) -> None:
        """Write the documents that are still in memory, and the index."""
        self._write_run()
        keys = np.concatenate([np.zeros(0, dtype="<u8"), *self._keys])
        rows = np.concatenate([np.zeros(0, dtype=self._row), *self._rows])
        hashes = np.concatenate([np.zeros((self._bands, 0), dtype="<u8"), *self._hashes], axis=1)
        for array in (keys, rows, np.argsort(rows["number"]).astype("<u4"), hashes):
            self._handle.write(np.ascontiguousarray(array).tobytes())

    def _write_run(self) -> None:
        if not self._records:
            return
        keys, rows = (np.concatenate(arrays) for arrays in zip(*self._pending, strict=True))
        rows["number"] = np.arange(self.runs[-1], self.runs[-1] + len(rows))
        order = np.argsort(keys, kind="stable")
        sizes = np.array([len(record) for record in self._records], dtype=np.uint64).reshape(-1, 2).sum(axis=1)[order]
        rows = rows[order]
        rows["position"] = self.index + np.cumsum(sizes) - sizes
        for number in order.tolist():
            self._handle.writelines(self._records[2 * number : 2 * number + 2])
        self.index += int(sizes.sum())
        self._keys.append(keys[order])
        self._rows.append(rows)
        self.runs.append(self.runs[-1] + len(rows))
        self._pending, self._records, self._collected = [], [], 0


class Spilled:
    """Reads the documents of one part, whose rows are in shuffled order; `runs` and `index` are those of the Spill."""

    def __init__(self, descriptor: Callable[[], int], runs: Sequence[int], index: int, row: np.dtype, bands: int) -> None:
        self._descriptor, self.runs, self._row, self._bands = descriptor, runs, row, bands
        count = runs[-1]
        self._count, self._index = count, index
        self._rows_at = index + 8 * count
        self._order_at = self._rows_at + row.itemsize * count
        self._bands_at = self._order_at + 4 * count

    def __len__(self) -> int:
        return self._count

    def shuffle_keys(self) -> np.ndarray:
        """(documents,) uint64."""
        return self._array(self._index, self._count, np.dtype("<u8"))

    def rows(self, begin: int = 0, end: int | None = None) -> np.ndarray:
        """(end - begin,) of row_type."""
        return self._array(self._rows_at + begin * self._row.itemsize, (self._count if end is None else end) - begin, self._row)

    def order(self) -> np.ndarray:
        """(documents,) uint32, the row of every document, by its number."""
        return self._array(self._order_at, self._count, np.dtype("<u4"))

    def band(self, band: int) -> np.ndarray:
        """(documents,) uint64 hashes of a band, by the number of the document."""
        assert band < self._bands
        return self._array(self._bands_at + 8 * self._count * band, self._count, np.dtype("<u8"))

    def records(self, begin: int, end: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield (metadata, text) of the rows begin <= row < end, which must be in one run. They are read at once."""
        first, last = self.rows(begin, begin + 1)[0], self.rows(end - 1, end)[0]
        tail = int(last["position"])
        start = int(first["position"])
        tail_meta = _HEAD.unpack(read_at(self._descriptor(), _HEAD.size, tail))[0]
        data = memoryview(read_at(self._descriptor(), tail + _HEAD.size + tail_meta + int(last["size"]) - start, start))
        place = 0
        while place < len(data):
            meta_bytes, text_bytes = _HEAD.unpack_from(data, place)
            middle = place + _HEAD.size + meta_bytes
            place, meta = middle + text_bytes, bytes(data[place + _HEAD.size : middle])
            yield meta, bytes(data[middle:place])

    def record(self, number: int) -> tuple[bytes, bytes]:
        """(metadata, text) of the document with this number."""
        row = int(self._array(self._order_at + 4 * number, 1, np.dtype("<u4"))[0])
        (record,) = self.records(row, row + 1)
        return record

    def _array(self, offset: int, count: int, kind: np.dtype) -> np.ndarray:
        return np.frombuffer(read_at(self._descriptor(), count * kind.itemsize, offset), dtype=kind)


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Read from a file; the kernel returns at most 2 GiB at a time."""
    data = os.pread(descriptor, size, offset)
    while len(data) < size:
        more = os.pread(descriptor, size - len(data), offset + len(data))
        if not more:
            raise EOFError("an intermediate file of data.shards is truncated; remove data.shards and run the command again")
        data += more
    return data
