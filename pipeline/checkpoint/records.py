"""Records: what each writer of a checkpoint reports when its files are on the disk, and their merge into parts.npy. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from pipeline.checkpoint import checked_json
from pipeline.checkpoint.data_file import FileEntry, WrittenFile
from pipeline.checkpoint.native import TensorEntry
from pipeline.checkpoint.parts import NOT_STORED, digest_of, padded, row_dtype, sort_rows


@dataclass(frozen=True)
class Merged:
    """The content of all records of a checkpoint.

    Attributes:
        files: all data files, by name.
        kinds: all kinds, "weight" first.
        tensors: name -> entry, by name.
        rows: of parts.npy, sorted.
    """

    files: list[FileEntry]
    kinds: list[str]
    tensors: dict[str, TensorEntry]
    rows: np.ndarray


def record_name(writer: int) -> str:
    """File name of the record of a writer."""
    return f"record-{writer:05d}.json"


def failure_name(writer: int) -> str:
    """Name of the file in which a writer says why it has no record."""
    return f"failed-{writer:05d}.json"


def write_record(folder: Path, writer: int, written: Sequence[WrittenFile]) -> None:
    """Write the record of a writer, atomically, after its files.

    Args:
        written: its files; none if it holds nothing that others do not write.

    Raises:
        OSError: it cannot be written.
    """
    kinds = list(dict.fromkeys(kind for file in written for kind in file.kinds))
    rows = np.concatenate([np.zeros(0, row_dtype(len(kinds))), *(_rows(number, file, kinds) for number, file in enumerate(written))])
    tensors = {
        part.name: {"shape": part.shape, "block_bytes": part.block_bytes, "dtypes": part.dtypes} for f in written for part in f.parts
    }
    numbers = {name: number for number, name in enumerate(tensors)}
    rows["tensor"] = [numbers[part.name] for file in written for part in file.parts]
    columns = {name: rows[name].tolist() for name in rows.dtype.names or ()}
    content = {"writer": writer, "files": [asdict(f.entry) for f in written], "kinds": kinds, "tensors": tensors, "rows": columns}
    checked_json.write(folder / record_name(writer), content, indent=None)


def _rows(number: int, file: WrittenFile, kinds: Sequence[str]) -> np.ndarray:
    """The rows of a file, without the numbers of their tensors."""
    rows = np.zeros(len(file.parts), row_dtype(len(kinds)))
    rows["file"], rows["offset"] = number, NOT_STORED
    for row, part in zip(rows, file.parts, strict=True):
        row["box_start"], row["box_stop"] = padded(part.box)
        row["start"], row["count"] = part.start, part.count
    columns = [kinds.index(kind) for kind in file.kinds]
    for position, name in enumerate(("offset", "block", "xxh3")):
        rows[name][:, columns] = file.places[:, :, position]
    return rows


def merge(folder: Path, writers: int) -> Merged:
    """Read all records of a checkpoint and merge them.

    Args:
        folder: the hidden folder of the checkpoint.

    Raises:
        OSError: a record is missing or cannot be read.
        ValueError: a record is damaged, or the records do not hold every element of every weight once.
    """
    records = [_read(folder / record_name(writer)) for writer in range(writers)]
    kinds = sorted(dict.fromkeys(kind for record in records for kind in record["kinds"]), key=lambda kind: kind != "weight")
    tensors: dict[str, dict[str, Any]] = {}
    for record in records:
        for name, entry in record["tensors"].items():
            if tensors.setdefault(name, entry) != entry:
                raise ValueError(f"{name}: writers disagree: {tensors[name]} and {entry}")
    names, files = sorted(tensors), [FileEntry(**file) for record in records for file in record["files"]]
    numbers = {name: number for number, name in enumerate(names)}
    parts, first_file = [np.zeros(0, row_dtype(len(kinds)))], 0
    for record in records:
        rows = _of_columns(record["rows"], [kinds.index(kind) for kind in record["kinds"]], len(kinds))
        rows["tensor"] = np.array([numbers[name] for name in record["tensors"]], np.uint32)[rows["tensor"]]
        rows["file"] += np.uint32(first_file)
        first_file += len(record["files"])
        parts.append(rows)
    rows = sort_rows(np.concatenate(parts))
    ends = np.searchsorted(rows["tensor"], np.arange(len(names)), side="right").tolist()
    spans = zip([0, *ends], ends, strict=False)
    entries = {name: _entry(name, tensors[name], rows, span, kinds) for name, span in zip(names, spans, strict=True)}
    return Merged(files, kinds, entries, rows)


def _read(path: Path) -> dict[str, Any]:
    try:
        return checked_json.read(path)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def _of_columns(columns: dict[str, list[Any]], positions: Sequence[int], kinds: int) -> np.ndarray:
    """The rows of a record, with a column for each kind of the checkpoint."""
    rows = np.zeros(len(columns["tensor"]), row_dtype(kinds))
    rows["offset"] = NOT_STORED
    for name in ("tensor", "file", "box_start", "box_stop", "start", "count"):
        rows[name] = np.array(columns[name], rows.dtype[name].base).reshape(rows[name].shape)
    for name in ("offset", "block", "xxh3"):
        rows[name][:, positions] = np.array(columns[name], "<u8").reshape(len(rows), len(positions))
    return rows


def _entry(name: str, tensor: dict[str, Any], rows: np.ndarray, span: tuple[int, int], kinds: Iterable[str]) -> TensorEntry:
    """The index entry of a weight.

    Raises:
        ValueError: its parts do not hold every element once.
    """
    parts, shape = rows[slice(*span)], tuple(tensor["shape"])
    if (count := int(parts["count"].sum())) != prod(shape):
        raise ValueError(f"{name}: its parts have {count} of {prod(shape)} elements")
    columns = [(kind, column) for column, kind in enumerate(kinds) if kind in tensor["dtypes"]]
    digests = {kind: f"{digest_of(parts['xxh3'][:, column]):016x}" for kind, column in columns}
    dtypes = {kind: tensor["dtypes"][kind] for kind, _ in columns}
    return TensorEntry(shape, dtypes, tensor["block_bytes"], span, xxhash.xxh3_64_hexdigest(parts.tobytes()), digests)
