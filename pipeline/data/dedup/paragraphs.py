"""Exact deduplication of paragraphs (lines) over the entire corpus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import xxhash

from pipeline.common.atomic_files import atomic_file
from pipeline.common.mpi import Comm, exchange
from pipeline.data.dedup import distributed
from pipeline.data.dedup.exact import repeated_rows

SLICE_ROWS = 1 << 22
"""Approximate number of paragraphs that a rank sends at a time: 28 bytes each."""

FLAGS = ".flags.npz"

_ROW = np.dtype([("hash", "<u8"), ("number", "<i8"), ("index", "<i8"), ("holder", "<i4")])


def hashes(texts: Iterable[str], characters: int) -> tuple[np.ndarray, np.ndarray]:
    """xxh3_64 of every line of at least `characters` characters, without leading and trailing whitespace.

    Returns:
        flat: (lines,) uint64.
        offsets: (texts + 1,) int64: text i has flat[offsets[i]:offsets[i + 1]].
    """
    of_texts = [[xxhash.xxh3_64_intdigest(line.encode()) for line in _long_lines(text, characters) if line] for text in texts]
    offsets = np.cumsum([0, *map(len, of_texts)], dtype=np.int64)
    return np.array([value for values in of_texts for value in values], dtype=np.uint64), offsets


def without(text: str, repeated: Sequence[bool], characters: int) -> str:
    """Remove repeated lines from a text; `repeated` has one flag per line that `hashes` returns, in order."""
    flags = iter(repeated)
    lines = zip(text.split("\n"), _long_lines(text, characters), strict=True)
    return "\n".join(line for line, long in lines if not (long and next(flags)))


def _long_lines(text: str, characters: int) -> Iterator[str]:
    """Yield every line without leading and trailing whitespace, empty if it is shorter than `characters`."""
    for line in text.split("\n"):
        stripped = line.strip()
        yield stripped if len(stripped) >= characters else ""


def find_repeated(comm: Comm, numbers: np.ndarray, flat: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Find the paragraphs that occurred earlier: in a document of lower number, or earlier in the same document. Collective.

    Args:
        numbers: (n,) int64 numbers of the documents that this rank holds, any part of the corpus in any order.
        flat: (paragraphs,) uint64 hashes of their paragraphs.
        offsets: (n + 1,) int64: document i has flat[offsets[i]:offsets[i + 1]].

    Returns:
        (paragraphs,) bool.
    """
    slices = distributed.slices(comm, len(flat), SLICE_ROWS)
    slice_of = np.empty(len(flat), dtype=np.uint16)
    for start in range(0, len(flat), SLICE_ROWS):
        slice_of[start : start + SLICE_ROWS] = distributed.slice_of(flat[start : start + SLICE_ROWS], slices)
    repeated = np.zeros(len(flat), dtype=bool)
    for part in range(slices):
        indices = np.flatnonzero(slice_of == part)
        rows = np.empty(len(indices), dtype=_ROW)
        rows["hash"], rows["index"], rows["holder"] = flat[indices], indices, comm.rank
        rows["number"] = numbers[np.searchsorted(offsets, indices, side="right") - 1]
        rows, later = _sorted(rows)
        repeated[rows["index"][later]] = True
        # Only the first paragraph of each hash is sent: a line that is in many documents would fill the memory of its owner.
        rows = np.delete(rows, later)
        rows, later = _sorted(exchange(comm, rows, (rows["hash"] % np.uint64(comm.size)).astype(np.int64)))
        repeated[exchange(comm, rows["index"][later], rows["holder"][later])] = True
    return repeated


def _sorted(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows by hash and number, and the indices of those that are not the first of their hash; the rows of a document stay in order."""
    rows = rows[np.lexsort((rows["number"], rows["hash"]))]
    return rows, repeated_rows(rows["hash"])[0]


class Flags:
    """The saved flags of the paragraphs of a part, which are read once; `stem` is the path of its files without suffix."""

    def __init__(self, stem: Path) -> None:
        with np.load(stem.with_suffix(FLAGS)) as saved:
            self._numbers, self._ends, self._counts, self._flags = (saved[name] for name in ("numbers", "ends", "counts", "flags"))

    def without(self, number: int, text: str, characters: int) -> str:
        """Remove the repeated lines of a document, by its number in the part."""
        row = int(np.searchsorted(self._numbers, number))
        end = int(self._ends[row])
        flags = self._flags[end - int(self._counts[row]) : end].tolist()
        return without(text, flags, characters) if any(flags) else text


def save_flags(stem: Path, numbers: np.ndarray, flags: np.ndarray, counts: np.ndarray) -> None:
    """Save one flag per paragraph of the given documents.

    Args:
        numbers: (documents,) sorted numbers in the part.
        flags: (paragraphs,) bool, in the order of the documents.
        counts: (documents,) paragraphs of each document.
    """
    with atomic_file(stem.with_suffix(FLAGS)) as handle:
        np.savez(handle, numbers=numbers, flags=flags, ends=np.cumsum(counts), counts=counts)
