"""The documents of all spills, numbered consecutively over the parts; input of deduplication and of the shard writer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pipeline.data.dedup import paragraphs
from pipeline.data.mpi import Comm
from pipeline.data.shard.shuffle import Order, ShardPlan, Tally
from pipeline.data.shard.spill import Spilled


class Pool:
    """The spills of all parts.

    Args:
        stems: paths of the spills of all parts, without suffixes.
        runs: bounds of the sorted runs of each spill.
    """

    def __init__(self, stems: Sequence[Path], runs: Sequence[Sequence[int]]) -> None:
        self._parts = [Spilled(stem, bounds) for stem, bounds in zip(stems, runs, strict=True)]
        self._starts = np.cumsum([0, *(bounds[-1] for bounds in runs)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def local_rows(self, comm: Comm) -> tuple[np.ndarray, np.ndarray]:
        """This rank's share: (documents,) int64 numbers, and their rows."""
        mine = range(comm.rank, len(self._parts), comm.size)
        numbers = [np.arange(self._starts[part], self._starts[part + 1]) for part in mine]
        rows = [np.array(self._parts[part].rows) for part in mine]
        if not rows:
            return np.zeros(0, dtype=np.int64), np.array(self._parts[0].rows[:0])
        return np.concatenate(numbers), np.concatenate(rows)

    def texts(self, numbers: Sequence[int]) -> list[str]:
        """The texts of the given documents."""
        return [self.record(number)[1].decode("utf-8") for number in numbers]

    def record(self, number: int) -> tuple[bytes, bytes]:
        """(metadata, text) of one document."""
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        return self._parts[part].record(number - int(self._starts[part]))

    def tally(self, comm: Comm, order: Order, drop: np.ndarray) -> list[Tally] | None:
        """The tally of every group of the shuffle without the dropped documents, summed over all ranks; None except on rank 0."""
        sizes = np.zeros(order.groups * order.bins, dtype=np.int64)
        documents = np.zeros(order.groups, dtype=np.int64)
        lowest: list[tuple[int, int] | None] = [None] * order.groups
        for part in range(comm.rank, len(self._parts), comm.size):
            start = int(self._starts[part])
            kept = self._kept(part, 0, int(self._starts[part + 1]) - start, drop)
            keys = self._parts[part].shuffle_keys[kept]
            bins = order.bin(keys)
            np.add.at(sizes, bins, self._parts[part].rows["size"][kept].astype(np.int64))
            groups = bins // order.bins
            documents += np.bincount(groups, minlength=order.groups)
            for group in np.unique(groups).tolist():
                within = np.flatnonzero(groups == group)
                first = within[np.argmin(keys[within])]
                candidate = (int(keys[first]), start + int(kept[first]))
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
        found = []
        for part, spilled in enumerate(self._parts):
            start = int(self._starts[part])
            for begin, end in spilled.between(plan.first, plan.stop):
                kept = set(self._kept(part, begin, end, drop).tolist())
                keys, rows = spilled.shuffle_keys, spilled.rows
                for row, record in enumerate(spilled.records(begin, end), start=begin):
                    number = start + row
                    if row in kept and number != plan.without and (plan.only is None or number == plan.only):
                        found.append((int(keys[row]), number, record, rows[row]))
        found.sort(key=lambda entry: entry[:2])
        for _, number, (meta, text), row in found:
            yield number, meta, text, row

    def find_repeated(self, comm: Comm, drop: np.ndarray, characters: int) -> None:
        """Find the repeated paragraphs among the kept documents, and save their flags next to the spills. Collective."""
        mine = range(comm.rank, len(self._parts), comm.size)
        kept = [self._kept(part, 0, int(self._starts[part + 1] - self._starts[part]), drop) + self._starts[part] for part in mine]
        found = [paragraphs.hashes(map(self._text, numbers.tolist()), characters) for numbers in kept]
        numbers = np.concatenate([np.zeros(0, dtype=np.int64), *kept])
        flat = np.concatenate([np.zeros(0, dtype=np.uint64), *(hashes for hashes, _ in found)])
        counts = np.concatenate([np.zeros(0, dtype=np.int64), *(np.diff(offsets) for _, offsets in found)])
        offsets = np.concatenate([[0], np.cumsum(counts)])
        repeated = paragraphs.find_repeated(comm, numbers, flat, offsets)
        for part, numbers_of_part in zip(mine, kept, strict=True):
            low, high = np.searchsorted(numbers, [self._starts[part], self._starts[part + 1]]) if len(numbers) else (0, 0)
            self._parts[part].save_flags(numbers_of_part - self._starts[part], repeated[offsets[low] : offsets[high]], counts[low:high])

    def without_repeated(self, number: int, text: bytes, characters: int) -> bytes:
        """The text of a document without the paragraphs that `find_repeated` flagged."""
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        flags = self._parts[part].flags(number - int(self._starts[part]))
        return paragraphs.without(text.decode("utf-8"), flags, characters).encode("utf-8") if any(flags) else text

    def _text(self, number: int) -> str:
        return self.texts([number])[0]

    def _kept(self, part: int, begin: int, end: int, drop: np.ndarray) -> np.ndarray:
        """The kept rows begin <= row < end of a part."""
        start = int(self._starts[part])
        low, high = np.searchsorted(drop, [start + begin, start + end])
        return np.setdiff1d(np.arange(begin, end), drop[low:high] - start, assume_unique=True)
