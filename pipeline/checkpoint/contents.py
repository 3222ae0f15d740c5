"""What a checkpoint contains, and where: its index and the rows of parts.npy, or the headers of files of format 1. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pipeline.checkpoint import native
from pipeline.checkpoint.data_file import header_of
from pipeline.checkpoint.data_reader import Counters
from pipeline.checkpoint.native import PARTS, FileEntry, Index, TensorEntry
from pipeline.checkpoint.parts import NOT_STORED, padded, read_header, row_dtype, sort_rows
from pipeline.common.errors import UserError

#: The longest gap between rows of parts.npy that is read with them, bytes.
_GAP = 4096


@dataclass(frozen=True)
class Contents:
    """The content of a checkpoint. Readers on many ranks can share what one rank has read.

    Attributes:
        index: the index, with the entries of all weights.
        rows: the rows of parts.npy, of a checkpoint of format 1; those of others are read when they are needed.
    """

    index: Index
    rows: np.ndarray | None = None


def read_contents(folder: Path) -> Contents:
    """Read the index of a checkpoint, and in format 1 the headers of all files.

    Raises:
        DamagedCheckpointError: they are not readable.
    """
    index = native.read_index(folder)
    return Contents(index) if index.format > 1 else _of_headers(folder, index)


class PartRows:
    """The rows of parts.npy by weight, of which only the requested ones are read."""

    def __init__(self, folder: Path, contents: Contents, counters: Counters) -> None:
        self._path, self._counters = folder / PARTS, counters
        self._tensors, self._all = contents.index.tensors, contents.rows
        self._dtype = row_dtype(len(contents.index.kinds))
        self._rows: dict[str, np.ndarray] = {}

    def read(self, names: Iterable[str]) -> list[np.ndarray]:
        """Return the rows of weights; what has been read is kept.

        Raises:
            DamagedCheckpointError: parts.npy is missing or damaged.
        """
        names = list(names)
        if missing := [name for name in dict.fromkeys(names) if name not in self._rows]:
            if self._all is None:
                self._read(sorted(missing, key=lambda name: self._tensors[name].rows))
            else:
                self._rows |= {name: self._all[slice(*self._tensors[name].rows)] for name in missing}
        return [self._rows[name] for name in names]

    def _read(self, names: list[str]) -> None:
        """Read the rows of weights, which are in the order of the file."""
        try:
            with open(self._path, "rb", buffering=0) as handle:
                self._counters.opened.append(PARTS)
                read_header(handle)
                start = handle.tell()
                self._counters.add(start)
                groups: list[list[str]] = []
                for name in names:
                    if not groups or self._tensors[name].rows[0] - self._tensors[groups[-1][-1]].rows[1] > _GAP // self._dtype.itemsize:
                        groups.append([])
                    groups[-1].append(name)
                for group in groups:
                    first, last = self._tensors[group[0]].rows[0], self._tensors[group[-1]].rows[1]
                    handle.seek(start + first * self._dtype.itemsize)
                    content = handle.read((last - first) * self._dtype.itemsize)
                    self._counters.add(len(content))
                    for name in group:
                        begin, end = (row - first for row in self._tensors[name].rows)
                        self._rows[name] = self._checked(name, content[begin * self._dtype.itemsize : end * self._dtype.itemsize])
        except (OSError, ValueError) as error:
            raise native.unreadable(self._path.parent, self._path, f"is not readable: {error}") from error

    def _checked(self, name: str, content: bytes) -> np.ndarray:
        """The rows of a weight from their bytes."""
        entry = self._tensors[name]
        if xxhash.xxh3_64_hexdigest(content) != entry.rows_xxh3:
            raise ValueError(f"rows {entry.rows[0]}:{entry.rows[1]}, which say where {name} is, differ from their checksum")
        return np.frombuffer(content, self._dtype)


def _of_headers(folder: Path, index: Index) -> Contents:
    """The content of a checkpoint of format 1, from the headers of its files.

    Raises:
        DamagedCheckpointError: a file is missing, or its header is damaged.
    """
    tensors: dict[str, TensorEntry] = {}
    per_file: list[np.ndarray] = []
    kinds = index.kinds
    for number, file in enumerate(index.files):
        try:
            header, start = header_of(folder / file.name)
            geometries: dict[str, Any] = json.loads(header["__metadata__"]["fragments"])
            rows = np.zeros(len(geometries), row_dtype(len(kinds)))
            rows["file"], rows["offset"] = number, NOT_STORED
            for row, (name, geometry) in zip(rows, geometries.items(), strict=True):
                piece, row["start"], row["count"] = native.piece_of(name, geometry)
                row["box_start"], row["box_stop"] = padded(piece.box)
                stored = {kind: header[key] for kind in kinds if (key := native.tensor_key(kind, name)) in header}
                for kind, entry in stored.items():
                    row["offset"][kinds.index(kind)] = start + entry["data_offsets"][0]
                dtypes = {kind: entry["dtype"] for kind, entry in stored.items()}
                tensors.setdefault(name, TensorEntry(piece.full_shape, dtypes, 1, (0, 0), "", {}))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _unreadable(folder, file, error) from error
        numbers = {name: number for number, name in enumerate(tensors)}
        rows["tensor"] = [numbers[name] for name in geometries]
        per_file.append(rows)
    order = {name: number for number, name in enumerate(sorted(tensors))}
    every = np.concatenate([np.zeros(0, row_dtype(len(kinds))), *per_file])
    every["tensor"] = np.array([order[name] for name in tensors], np.uint32)[every["tensor"]]
    every = sort_rows(every)
    ends = np.searchsorted(every["tensor"], np.arange(len(order)), side="right").tolist()
    spans = dict(zip(order, zip([0, *ends], ends, strict=False), strict=True))
    return Contents(replace(index, tensors={name: replace(tensors[name], rows=spans[name]) for name in order}), every)


def _unreadable(folder: Path, file: FileEntry, error: Exception) -> UserError:
    path = folder / file.name
    if not path.is_file():
        return native.unreadable(folder, path, "is missing")
    size = path.stat().st_size
    reason = f"{size} bytes, expected {file.bytes}" if size != file.bytes else str(error)
    return native.unreadable(folder, path, f"is not readable: {reason}")
