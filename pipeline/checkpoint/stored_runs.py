"""Where the elements of a checkpoint are stored, in both formats, and their values, a few megabytes at a time. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from pipeline.checkpoint import native, parts
from pipeline.checkpoint.contents import Contents
from pipeline.checkpoint.native import Index, TensorEntry
from pipeline.checkpoint.parts import ITEM_SIZE, NOT_STORED, Box

#: Elements that are in memory at a time.
_CHUNK = 1 << 20
#: numpy's dtype for that of safetensors; BF16 is read as the upper halves of fp32.
_NUMPY = {"F64": "<f8", "F32": "<f4", "BF16": "<u2", "F16": "<f2", "I64": "<i8", "U64": "<u8", "I32": "<i4"}
_NUMPY |= {"I16": "<i2", "I8": "<i1", "U8": "<u1", "BOOL": "<u1"}


@dataclass(frozen=True)
class StoredRun:
    """A run of the elements of a box of a full weight, of one kind, in a file (words: parts.py).

    Attributes:
        kind: "weight" or a state of the optimizer.
        shape: of the full weight.
        box: within the full weight.
        start: first element in the flattened box.
        dtype: name in safetensors.
        file: position in Index.files.
        offset: of its first byte in the file.
        block: position of its first block in the file's block digests.
        xxh3: checksum of its block digests; None in format 1.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    box: Box
    start: int
    count: int
    dtype: str
    file: int
    offset: int
    block: int = 0
    xxh3: int | None = None

    @property
    def item_size(self) -> int:
        """Bytes of an element."""
        return ITEM_SIZE[self.dtype]

    @property
    def bytes(self) -> int:
        """Bytes in the file."""
        return self.count * self.item_size

    def where(self, first: int, last: int) -> str:
        """Name elements `first : last` of the run, for messages: in the flattened full weight where they are contiguous there."""
        inner = [stop - start == size for (start, stop), size in zip(self.box[1:], self.shape[1:], strict=True)]
        before = self.start + first
        count = last - first
        if all(inner):  # the box has whole rows
            before += self.box[0][0] * prod(self.shape[1:]) if self.box else 0
            return f"elements {before:,} to {before + count - 1:,} of {prod(self.shape):,}"
        box = ", ".join(f"{start}:{stop}" for start, stop in self.box)
        size = prod(stop - start for start, stop in self.box)
        return f"elements {before:,} to {before + count - 1:,} of the {size:,} of its slice [{box}]"


@contextmanager
def report_damage(folder: Path) -> Iterator[None]:
    """Convert what reading a damaged or missing file raises.

    Raises:
        DamagedCheckpointError: in place of it.
    """
    try:
        yield
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        fix = f"tools/checkpoint verify {folder} names what is damaged; use an older checkpoint"
        raise native.unreadable(folder, folder, f"is not readable: {error}", fix) from error


def runs(folder: Path, contents: Contents) -> Iterator[StoredRun]:
    """The runs of a checkpoint, weight by weight.

    Raises:
        ValueError: parts.npy is damaged.
        OSError: it cannot be opened.
    """
    index = contents.index
    if contents.rows is not None:
        yield from runs_of_rows(contents.rows, index.kinds, index.tensors)
    else:
        for name in index.tensors:
            yield from runs_of_tensor(folder, index, name)


def runs_of_tensor(folder: Path, index: Index, name: str) -> Iterator[StoredRun]:
    """The runs of a weight of format 2, in the order of the rows.

    Raises:
        ValueError: its rows of parts.npy are damaged.
        OSError: parts.npy cannot be opened.
    """
    entry = index.tensors[name]
    rows = parts.read_rows(folder / native.PARTS, *entry.rows)
    if f"{xxhash.xxh3_64_intdigest(rows.tobytes()):016x}" != entry.rows_xxh3:
        raise ValueError(f"{native.PARTS}: rows {entry.rows[0]} to {entry.rows[1] - 1} do not match their checksum")
    yield from runs_of_rows(rows, index.kinds, index.tensors)


def runs_of_rows(rows: np.ndarray, kinds: Sequence[str], tensors: Mapping[str, TensorEntry]) -> Iterator[StoredRun]:
    """The runs that rows of parts.npy describe.

    Args:
        rows: in any order.
        kinds, tensors: of the checkpoint, in the order of the index.
    """
    entries = list(tensors.items())
    for row in rows:
        name, entry = entries[row["tensor"]]
        box, start, count, file = parts.box_of(row, len(entry.shape)), int(row["start"]), int(row["count"]), int(row["file"])
        for kind, offset, block, xxh3 in zip(kinds, row["offset"].tolist(), row["block"].tolist(), row["xxh3"].tolist(), strict=True):
            if offset != NOT_STORED:
                yield StoredRun(name, kind, entry.shape, box, start, count, entry.dtypes[kind], file, offset, block, xxh3)


def values(path: Path, run: StoredRun) -> Iterator[npt.NDArray[Any]]:
    """The elements of a run, flat, a few megabytes at a time.

    Raises:
        ValueError: the file is too short.
        OSError: it cannot be read.
    """
    with open(path, "rb") as handle:
        handle.seek(run.offset)
        for first in range(0, run.count, _CHUNK):
            wanted = min(_CHUNK, run.count - first)
            elements = np.fromfile(handle, _NUMPY[run.dtype], wanted)
            if len(elements) != wanted:
                raise ValueError(f"{path.name}: it ends within {run.kind} of {run.name}")
            yield (elements.astype("<u4") << 16).view("<f4") if run.dtype == "BF16" else elements
