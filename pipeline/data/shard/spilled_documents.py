"""The documents of all spills, numbered in the order of the input; input of deduplication and of the shard writer.

Numbers are consecutive over the parts, and depend neither on the division of the input into parts nor on the shuffle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pipeline.common.mpi import Comm
from pipeline.data.dedup import paragraphs
from pipeline.data.shard.shuffle import KEY_BITS, Order, ShardPlan, Tally
from pipeline.data.shard.spill import Spilled


class Pool:
    """The spills of all parts.

    Args:
        stems: paths of the spills of all parts, without suffixes.
        runs: bounds of the sorted runs of each spill.
    """

    def __init__(self, stems: Sequence[Path], runs: Sequence[Sequence[int]]) -> None:
        self.stems = stems
        self._parts = [Spilled(stem, bounds) for stem, bounds in zip(stems, runs, strict=True)]
        self._starts = np.cumsum([0, *(bounds[-1] for bounds in runs)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def local_rows(self, comm: Comm) -> tuple[np.ndarray, np.ndarray]:
        """This rank's share: (documents,) int64 numbers, sorted, and their rows."""
        mine = range(comm.rank, len(self._parts), comm.size)
        numbers = [np.arange(self._starts[part], self._starts[part + 1]) for part in mine]
        rows = [self._parts[part].rows[self._parts[part].order] for part in mine]
        if not rows:
            return np.zeros(0, dtype=np.int64), np.array(self._parts[0].rows[:0])
        return np.concatenate(numbers), np.concatenate(rows)

    def texts(self, numbers: Sequence[int]) -> list[str]:
        """The texts of the given documents."""
        return [self.record(number)[1].decode("utf-8") for number in numbers]

    def record(self, number: int) -> tuple[bytes, bytes]:
        """(metadata, text) of one document."""
        part = int(self.parts_of(np.array([number]))[0])
        return self._parts[part].record(number - int(self._starts[part]))

    def parts_of(self, numbers: np.ndarray) -> np.ndarray:
        """The part of every document: (numbers,) int64."""
        return np.searchsorted(self._starts, numbers, side="right") - 1

    def groups_and_sizes(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The group of the shuffle and the bytes of text of documents: two (numbers,) int64 arrays, in the order of the sorted numbers."""
        groups, sizes = np.zeros(len(numbers), dtype=np.int64), np.zeros(len(numbers), dtype=np.int64)
        parts = self.parts_of(numbers)
        for part in np.unique(parts).tolist():
            mine, spilled = parts == part, self._parts[part]
            rows = spilled.order[numbers[mine] - self._starts[part]]
            groups[mine] = (spilled.shuffle_keys[rows] >> np.uint64(KEY_BITS)).astype(np.int64)
            sizes[mine] = spilled.rows["size"][rows]
        return groups, sizes

    def tally(self, comm: Comm, order: Order, drop: np.ndarray) -> list[Tally] | None:
        """The tally of every group of the shuffle without the dropped documents, summed over all ranks; None except on rank 0."""
        sizes = np.zeros(order.groups * order.bins, dtype=np.int64)
        documents = np.zeros(order.groups, dtype=np.int64)
        lowest: list[tuple[int, int] | None] = [None] * order.groups
        for part in range(comm.rank, len(self._parts), comm.size):
            rows = self._parts[part].rows
            numbers = self._starts[part] + rows["number"]
            remaining = np.flatnonzero(~_contained(numbers, drop))
            keys = self._parts[part].shuffle_keys[remaining]
            bins = order.bin(keys)
            np.add.at(sizes, bins, rows["size"][remaining].astype(np.int64))
            groups = bins // order.bins
            documents += np.bincount(groups, minlength=order.groups)
            for group in np.unique(groups).tolist():
                within = np.flatnonzero(groups == group)
                first = within[np.lexsort((numbers[remaining[within]], keys[within]))[0]]
                candidate = (int(keys[first]), int(numbers[remaining[first]]))
                lowest[group] = min(filter(None, (lowest[group], candidate)))
        gathered = comm.gather((sizes, documents, lowest))
        if gathered is None:
            return None
        sizes, documents = (sum(column) for column in list(zip(*gathered, strict=True))[:2])
        firsts = [min(filter(None, found), default=None) for found in zip(*(entry[2] for entry in gathered), strict=True)]
        return [
            Tally(int(documents[group]), sizes[group * order.bins : (group + 1) * order.bins], firsts[group])
            for group in range(order.groups)
        ]

    def shard_documents(self, plan: ShardPlan, drop: np.ndarray) -> Iterator[tuple[int, bytes, bytes, np.void]]:
        """Yield (number, metadata, text, row) of every document of a shard, in shuffled order."""
        documents = []
        for part, spilled in enumerate(self._parts):
            for begin, end in spilled.between(plan.first, plan.stop):
                keys, rows = spilled.shuffle_keys[begin:end], spilled.rows[begin:end]
                numbers = self._starts[part] + rows["number"]
                dropped = _contained(numbers, drop)
                for row, record in enumerate(spilled.records(begin, end)):
                    number = int(numbers[row])
                    if not dropped[row] and number != plan.without and (plan.only is None or number == plan.only):
                        documents.append((int(keys[row]), number, record, rows[row]))
        documents.sort(key=lambda entry: entry[:2])
        for _, number, (meta, text), row in documents:
            yield number, meta, text, row

    def find_repeated(self, comm: Comm, drop: np.ndarray, characters: int) -> None:
        """Find the repeated paragraphs among the kept documents, and save their flags next to the spills. Collective."""
        mine = range(comm.rank, len(self._parts), comm.size)
        remaining = [self._kept(part, drop) for part in mine]
        hashed = [paragraphs.hashes(map(self._text, numbers.tolist()), characters) for numbers in remaining]
        numbers = np.concatenate([np.zeros(0, dtype=np.int64), *remaining])
        flat = np.concatenate([np.zeros(0, dtype=np.uint64), *(hashes for hashes, _ in hashed)])
        counts = np.concatenate([np.zeros(0, dtype=np.int64), *(np.diff(offsets) for _, offsets in hashed)])
        offsets = np.concatenate([[0], np.cumsum(counts)])
        repeated = paragraphs.find_repeated(comm, numbers, flat, offsets)
        for part, numbers_of_part in zip(mine, remaining, strict=True):
            low, high = np.searchsorted(numbers, [self._starts[part], self._starts[part + 1]]) if len(numbers) else (0, 0)
            self._parts[part].save_flags(numbers_of_part - self._starts[part], repeated[offsets[low] : offsets[high]], counts[low:high])

    def without_repeated(self, number: int, text: bytes, characters: int) -> bytes:
        """The text of a document without the paragraphs that `find_repeated` flagged."""
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        flags = self._parts[part].flags(number - int(self._starts[part]))
        return paragraphs.without(text.decode("utf-8"), flags, characters).encode("utf-8") if any(flags) else text

    def _text(self, number: int) -> str:
        return self.texts([number])[0]

    def _kept(self, part: int, drop: np.ndarray) -> np.ndarray:
        """The sorted numbers of the documents of a part that are not dropped."""
        numbers = np.arange(self._starts[part], self._starts[part + 1])
        return numbers[~_contained(numbers, drop)]


def _contained(numbers: np.ndarray, drop: np.ndarray) -> np.ndarray:
    """Which numbers are in the sorted array `drop`: (numbers,) bool."""
    if not len(drop):
        return np.zeros(len(numbers), dtype=bool)
    places = np.searchsorted(drop, numbers)
    return drop[np.minimum(places, len(drop) - 1)] == numbers
