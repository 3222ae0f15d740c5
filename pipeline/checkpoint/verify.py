"""Reads data files again and compares them with their checksums. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np

from pipeline.checkpoint.data_file import FileEntry, read_digests
from pipeline.checkpoint.native import TensorEntry
from pipeline.checkpoint.parts import ITEM_SIZE, NOT_STORED, box_of, digest_of

#: Files that are read at a time; reading and hashing release the interpreter.
_THREADS = 8


def damages(
    folder: Path, files: Sequence[FileEntry], kinds: Sequence[str], tensors: Mapping[str, TensorEntry], rows: np.ndarray
) -> Iterator[str]:
    """Read every byte of the data files of a checkpoint, and yield what is missing or changed: file, weight, kind and range.

    Args:
        folder: of the checkpoint.
        files: its files, in the order of the index.
        kinds: its kinds, in the order of the index.
        tensors: its weights, in the order of the index.
        rows: of parts.npy.
    """
    by_file = rows[np.argsort(rows["file"], kind="stable")]
    groups = np.split(by_file, np.searchsorted(by_file["file"], np.arange(1, len(files))))
    entries = list(tensors.items())

    def of_file(pair: tuple[FileEntry, np.ndarray]) -> list[str]:
        return list(_damages_of_file(folder / pair[0].name, pair[0], kinds, entries, pair[1]))

    with ThreadPoolExecutor(_THREADS) as pool:
        yield from chain.from_iterable(pool.map(of_file, zip(files, groups, strict=True)))


def _damages_of_file(
    path: Path, entry: FileEntry, kinds: Sequence[str], tensors: Sequence[tuple[str, TensorEntry]], rows: np.ndarray
) -> Iterator[str]:
    """What is missing or changed of one file."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        yield f"{path.name}: {error.strerror}"
        return
    try:
        if (size := os.fstat(handle).st_size) != entry.bytes:
            yield f"{path.name}: has {size} bytes, expected {entry.bytes}"
            return
        stored = [(int(row["offset"][column]), column, row) for row in rows for column in range(len(kinds))]
        digests = []
        for offset, column, row in sorted((part for part in stored if part[0] != NOT_STORED), key=lambda part: part[0]):
            name, tensor = tensors[int(row["tensor"])]
            item = ITEM_SIZE[tensor.dtypes[kinds[column]]]
            before = int(row["start"]) * item % tensor.block_bytes
            found = read_digests(handle, offset, int(row["count"]) * item, tensor.block_bytes, before)
            if digest_of(found) != int(row["xxh3"][column]):
                box, start = box_of(row, len(tensor.shape)), int(row["start"])
                where = f"{kinds[column]} of {name}, elements {start}:{start + int(row['count'])} of {box}"
                yield f"{path.name}: {where}: other bytes than saved"
            digests.append(found)
        in_order = np.concatenate([np.zeros(0, np.uint64), *digests])
        stored_digests = os.pread(handle, 8 * len(in_order), entry.bytes - 8 * len(in_order))
        if stored_digests != in_order.astype("<u8").tobytes() or f"{digest_of(in_order):016x}" != entry.xxh3:
            yield f"{path.name}: its checksums are not those of its content"
    finally:
        os.close(handle)
