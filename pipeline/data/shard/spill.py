"""Intermediate files between reading and writing: one file of documents per part, in shuffled order, with an index.

The documents of a part are numbered from 0 in the order of the input, so that a number does not depend on the shuffle or on the parts.

One file per part and shard would be simpler, but thousands of parts and shards would make millions of files.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pipeline.common.atomic_files import atomic_file

RUN_BYTES = 128 << 20
"""Bytes of documents that are collected in memory before a sorted run is written. Usually a part has one run."""

_HEAD = struct.Struct("<II")  # bytes of metadata, bytes of text


def row_type(permutations: int) -> np.dtype:
    """The dtype of the index row of a document.

    Fields: number of the document in the part, offset in the file, bytes of text, language, score, hashes of text and URL, and signature.
    """
    fields = [("number", "<u4"), ("position", "<u8"), ("size", "<u4"), ("language", "S16"), ("score", "<i4")]
    return np.dtype([*fields, ("exact", "<u8", 2), ("url", "<u8", 2), ("minhash", "<u4", permutations)])


class Spill:
    """Writes the documents of one part.

    Args:
        stem: path of the files without suffix: `.documents`, `.places.npy` (shuffle keys) and `.rows.npy`, all in shuffled order, and
            `.order.npy` (the row of every document, by its number).
        row: dtype returned by row_type.
    """

    def __init__(self, stem: Path, row: np.dtype) -> None:
        self._stem, self._row = stem, row
        self._file = atomic_file(stem.with_suffix(".documents"))
        self._handle = self._file.__enter__()
        self._pending: list[tuple[np.ndarray, np.ndarray]] = []
        self._records: list[bytes] = []
        self._collected = self._written = 0
        self._keys: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        self.runs: list[int] = [0]

    def add(self, keys: np.ndarray, metadata: Sequence[dict[str, Any]], texts: Sequence[bytes], rows: np.ndarray) -> None:
        """Add documents.

        Args:
            keys: (documents,) uint64 shuffle keys.
            rows: (documents,) of row_type; this method sets number, position and size.
        """
        rows["size"] = [len(text) for text in texts]
        for fields, text in zip(metadata, texts, strict=True):
            meta = orjson.dumps(fields, default=str)
            record = _HEAD.pack(len(meta), len(text)) + meta + text
            self._records.append(record)
            self._collected += len(record)
        self._pending.append((keys, rows))
        if self._collected >= RUN_BYTES:
            self._write_run()

    def close(self) -> None:
        """Write the documents that are still in memory, and the index."""
        self._write_run()
        self._file.__exit__(None, None, None)
        keys = np.concatenate([np.zeros(0, dtype="<u8"), *self._keys])
        rows = np.concatenate([np.zeros(0, dtype=self._row), *self._rows])
        for ending, array in ((".places.npy", keys), (".rows.npy", rows), (".order.npy", np.argsort(rows["number"]).astype("<u4"))):
            with atomic_file(self._stem.with_suffix(ending)) as handle:
                np.save(handle, array)

    def discard(self, error: BaseException) -> None:
        """Remove the partial file."""
        try:
            self._file.__exit__(type(error), error, error.__traceback__)
        except BaseException as raised:
            if raised is not error:
                raise

    def _write_run(self) -> None:
        if not self._records:
            return
        keys, rows = (np.concatenate(arrays) for arrays in zip(*self._pending, strict=True))
        rows["number"] = np.arange(self.runs[-1], self.runs[-1] + len(rows))
        order = np.argsort(keys, kind="stable")
        sizes = np.array([len(record) for record in self._records], dtype=np.uint64)[order]
        rows = rows[order]
        rows["position"] = self._written + np.cumsum(sizes) - sizes
        self._handle.writelines(self._records[number] for number in order.tolist())
        self._written += int(sizes.sum())
        self._keys.append(keys[order])
        self._rows.append(rows)
        self.runs.append(self.runs[-1] + len(rows))
        self._pending, self._records, self._collected = [], [], 0


class Spilled:
    """Reads the documents of one part. Rows are in shuffled order; `order` maps the numbers of documents to rows."""

    def __init__(self, stem: Path, runs: Sequence[int]) -> None:
        self._stem, self._runs = stem, runs

    @property
    def shuffle_keys(self) -> np.ndarray:
        """(documents,) uint64."""
        return np.load(self._stem.with_suffix(".places.npy"), mmap_mode="r")

    @property
    def rows(self) -> np.ndarray:
        """(documents,) of row_type."""
        return np.load(self._stem.with_suffix(".rows.npy"), mmap_mode="r")

    @property
    def order(self) -> np.ndarray:
        """(documents,) uint32, the row of every document, by its number."""
        return np.load(self._stem.with_suffix(".order.npy"), mmap_mode="r")

    def between(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (first row, end) of the documents with first <= shuffle key < stop, for every run that has any."""
        keys = self.shuffle_keys
        for begin, end in zip(self._runs[:-1], self._runs[1:], strict=True):
            low, high = np.searchsorted(keys[begin:end], np.array([first, stop], dtype=np.uint64)).tolist()
            if low < high:
                yield begin + low, begin + high

    def records(self, begin: int, end: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield (metadata, text) of the rows begin <= row < end, which must be in one run."""
        rows = self.rows[begin:end]
        start = int(rows["position"][0])
        with open(self._stem.with_suffix(".documents"), "rb") as handle:
            handle.seek(start)
            for _ in range(len(rows)):
                meta_bytes, text_bytes = _HEAD.unpack(handle.read(_HEAD.size))
                yield handle.read(meta_bytes), handle.read(text_bytes)

    def record(self, number: int) -> tuple[bytes, bytes]:
        """(metadata, text) of the document with this number."""
        data, start = _mapped(self._stem.with_suffix(".documents")), int(self.rows[self.order[number]]["position"])
        meta_bytes, text_bytes = _HEAD.unpack_from(data, start)
        middle = start + _HEAD.size + meta_bytes
        return data[start + _HEAD.size : middle], data[middle : middle + text_bytes]

    def save_flags(self, numbers: np.ndarray, flags: np.ndarray, counts: np.ndarray) -> None:
        """Save one flag per paragraph of the given documents.

        Args:
            numbers: (documents,) sorted.
            flags: (paragraphs,) bool, in the order of the documents.
            counts: (documents,) paragraphs of each document.
        """
        with atomic_file(self._stem.with_suffix(".flags.npz")) as handle:
            np.savez(handle, numbers=numbers, flags=flags, ends=np.cumsum(counts), counts=counts)

    def flags(self, number: int) -> list[bool]:
        """The saved flags of one document."""
        saved = _loaded(self._stem.with_suffix(".flags.npz"))
        row = int(np.searchsorted(saved["numbers"], number))
        end = int(saved["ends"][row])
        return saved["flags"][end - int(saved["counts"][row]) : end].tolist()


@lru_cache(maxsize=4)
def _loaded(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as arrays:
        return dict(arrays)


@lru_cache(maxsize=64)
def _mapped(path: Path) -> mmap.mmap:
    with open(path, "rb") as handle:
        return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
