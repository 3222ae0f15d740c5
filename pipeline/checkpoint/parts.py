"""Parts: the stored runs of elements of a full weight, as rows of parts.npy; boxes, runs and blocks. Imports no torch.

The words, after those of parallel/pieces.py:

- A *box* is the piece of a full weight that a rank holds: for each dim, the first and the last + 1 index.
- A *run* is `[start, start + count)` of the elements of a flattened box.
- A *part* is a run of a box that one file stores, in one or several *kinds* (the weight and the state of the optimizer).
- The bytes of a part and kind are divided into *blocks* with a checksum each, so that a reader can verify what it reads. Blocks are
  counted from the first element of the box, so that they end where slices of its rows end; the first block of a part may be shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import xxhash

#: First and last + 1 index for each dim.
Box = tuple[tuple[int, int], ...]
#: Dims of a row; stacked experts have three, other weights fewer.
DIMS = 3
#: Offset in the file of a kind that is not stored.
NOT_STORED = 2**64 - 1
#: The most and the least bytes of a block, and the least of a weight whose rows are sliced; a checksum has 8 bytes.
BLOCK, SMALLEST_BLOCK, SMALLEST_ROW_BLOCK = 32 << 10, 512, 1024
#: Blocks of a weight, and of each row of a weight whose rows are sliced, at least.
BLOCKS_PER_WEIGHT, BLOCKS_PER_ROW = 1024, 16
#: Bytes of an element, by the name of its dtype in safetensors.
ITEM_SIZE = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class Part:
    """A run of the elements of a box of a full weight, and how it is stored.

    Attributes:
        shape: of the full weight.
        box: within the full weight.
        start: first element in the flattened box.
        dtypes: kind -> name of its dtype in safetensors, for the kinds that are stored.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    count: int
    block_bytes: int
    dtypes: dict[str, str]

    def key(self, kind: str) -> str:
        """Name of the tensor in the file: "exp_avg/NAME[0:64,0:128]@4096" for the run from element 4096 of that box."""
        box = ",".join(f"{first}:{last}" for first, last in self.box)
        return f"{kind}/{self.name}[{box}]@{self.start}"

    def bytes(self, kind: str) -> int:
        """Bytes of one kind."""
        return self.count * ITEM_SIZE[self.dtypes[kind]]

    def before(self, kind: str) -> int:
        """Bytes by which the first block of one kind is shorter than the others."""
        return self.start * ITEM_SIZE[self.dtypes[kind]] % self.block_bytes


def row_dtype(kinds: int) -> np.dtype[Any]:
    """The fields of a row of parts.npy.

    Args:
        kinds: number of kinds of the checkpoint; the fields `offset` (bytes in the file), `block` (position of the first block in the
            file's block digests) and `xxh3` (checksum of the part's block digests) have a value for each, in the order of the index.
    """
    fields = [("tensor", "<u4"), ("file", "<u4"), ("box_start", "<i8", (DIMS,)), ("box_stop", "<i8", (DIMS,))]
    fields += [("start", "<u8"), ("count", "<u8")]
    return np.dtype([*fields, *((name, "<u8", (kinds,)) for name in ("offset", "block", "xxh3"))])


def block_bytes(shape: Sequence[int], sliced_dim: int, item_size: int) -> int:
    """Bytes of a block of a weight; it does not depend on the layout.

    A reader has to read whole blocks: at both ends of a run, or, of a slice along an inner dim, of each row.

    Args:
        shape: of the full weight.
        sliced_dim: the largest dim that tensor parallelism slices; 0 also for none.
        item_size: bytes of an element of the weight.
    """
    most = max(prod(shape) * item_size // BLOCKS_PER_WEIGHT, 1)
    block = min(max(1 << most.bit_length() - 1, SMALLEST_BLOCK), BLOCK)
    if sliced_dim == 0:
        return block
    row = prod(shape[sliced_dim:]) * item_size
    return min(max(row // BLOCKS_PER_ROW // item_size * item_size, SMALLEST_ROW_BLOCK), block)


def count_blocks(size: int, block: int, before: int = 0) -> int:
    """Number of blocks of `size` bytes, the first of which is shorter by `before`, and the last one may be shorter."""
    return -(-(before + size) // block) if size else 0


def digest_of(digests: npt.NDArray[np.uint64]) -> int:
    """The checksum of checksums: xxh3-64 of them as little-endian numbers."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(digests, "<u8").data)


def padded(box: Box) -> tuple[list[int], list[int]]:
    """Start and stop of a box with DIMS dims, the last of which are of size 1.

    Raises:
        ValueError: the box has more dims.
    """
    if len(box) > DIMS:
        raise ValueError(f"a weight with {len(box)} dims; a checkpoint stores up to {DIMS}")
    filled = [*box, *[(0, 1)] * (DIMS - len(box))]
    return [first for first, _ in filled], [last for _, last in filled]


def box_of(row: np.void, dims: int) -> Box:
    """The box of a row, without the dims that `padded` appended."""
    return tuple((int(first), int(last)) for first, last in zip(row["box_start"][:dims], row["box_stop"][:dims], strict=True))


def sort_rows(rows: np.ndarray) -> np.ndarray:
    """Return the rows by tensor, box and start of the run."""
    corners = [rows[name][:, dim] for name in ("box_start", "box_stop") for dim in range(DIMS)]
    return rows[np.lexsort((rows["start"], *reversed(corners), rows["tensor"]))]  # the last key is the first criterion


def read_rows(path: Path, first: int = 0, last: int | None = None) -> np.ndarray:
    """Read rows `first : last` of parts.npy, and nothing else of it.

    Raises:
        ValueError: the file is no array of rows, or too short.
    """
    with open(path, "rb") as handle:
        rows, dtype = read_header(handle)
        last = rows if last is None else last
        handle.seek(first * dtype.itemsize, 1)
        read = np.fromfile(handle, dtype, last - first)
    if len(read) != last - first:
        raise ValueError(f"it ends before row {last}")
    return read


def read_header(handle: IO[bytes] | FileIO) -> tuple[int, np.dtype[Any]]:
    """Read the header of parts.npy, up to its first row, and return the number of rows and their fields.

    Raises:
        ValueError: it is damaged.
    """
    try:
        version = np.lib.format.read_magic(handle)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(handle)
        return int(shape[0]), dtype
    except Exception as error:  # numpy parses the header as Python: a damaged one raises whatever the parser raises
        raise ValueError("parts.npy: its header is damaged") from error


def overlap(
    box: Box, run: tuple[int, int], other_box: Box, other_run: tuple[int, int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The elements that two runs of two boxes of a full weight have in common, as contiguous stretches of both.

    Args:
        box: one box.
        run: start and count in the flattened box.
        other_box: another box of the same full weight.
        other_run: start and count in that flattened box.

    Returns:
        For each stretch, in ascending order: its first element counted from the start of the first run, its first element counted from the
        start of the other run, and its number of elements.
    """
    if min(run[1], other_run[1]) == 0:
        return _no_stretches()
    if not box:  # a scalar
        zero = np.zeros(1, np.int64)
        return zero, zero, zero + 1
    touched, other_touched = _touched(box, run), _touched(other_box, other_run)
    common = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(touched, other_touched, strict=True)]
    if any(first >= last for first, last in common):
        return _no_stretches()
    dim = len(box) - 1  # along which a stretch extends; all dims after it are covered in both boxes
    while dim > 0 and box[dim] == common[dim] == other_box[dim]:
        dim -= 1
    begin, other_begin = (_offsets(common, side, dim) - start for side, (start, _) in ((box, run), (other_box, other_run)))
    size = (common[dim][1] - common[dim][0]) * prod(last - first for first, last in box[dim + 1 :])
    skipped = np.maximum(0, np.maximum(-begin, -other_begin))
    end = np.minimum(size, np.minimum(run[1] - begin, other_run[1] - other_begin))
    kept = end > skipped
    begin, other_begin, skipped, end = begin[kept], other_begin[kept], skipped[kept], end[kept]
    return begin + skipped, other_begin + skipped, end - skipped


def _no_stretches() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    empty = np.zeros(0, np.int64)
    return empty, empty, empty


def _touched(box: Box, run: tuple[int, int]) -> Box:
    """The box, without the first and last indices of its first dim at which the run has no element."""
    start, count = run
    row = prod(last - first for first, last in box[1:])
    origin = box[0][0]
    return ((origin + start // row, origin + (start + count - 1) // row + 1), *box[1:])


def _offsets(common: list[tuple[int, int]], box: Box, dim: int) -> npt.NDArray[np.int64]:
    """Position in a flattened box of the first element of each stretch along `dim` of the box `common`, which lies in it."""
    strides = [prod(last - first for first, last in box[d + 1 :]) for d in range(len(box))]
    offsets = np.full((), (common[dim][0] - box[dim][0]) * strides[dim], np.int64)
    for d in range(dim):
        indices = np.arange(common[d][0] - box[d][0], common[d][1] - box[d][0], dtype=np.int64)
        offsets = offsets[..., None] + indices * strides[d]
    return offsets.reshape(-1)
