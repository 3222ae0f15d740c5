"""The documents of all spills, numbered in the order of the input; input of deduplication and of the shard writer.

Numbers are consecutive over the parts, and depend neither on the division of the input into parts nor on the shuffle. A rank holds the
documents of every `size`-th part: it alone reads them, and it has the drops of these documents only.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from pipeline.common.mpi import Comm
from pipeline.config.data import DedupConfig
from pipeline.data.dedup import paragraphs
from pipeline.data.dedup.duplicates import Documents
from pipeline.data.shard.shuffle import KEY_BITS, Order, Tally
from pipeline.data.shard.spill import SUFFIX, Spilled, row_type

RESERVED = 64
"""Descriptors that are left for everything else: outputs, logs, MPI."""


class _OpenFile:
    """A file that is closed when its last reference is dropped."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def most_open_files() -> int:
    """The number of files that this process can keep open; raises its soft limit to the hard limit, at most 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(1, (wanted if soft == resource.RLIM_INFINITY else soft) - RESERVED)


def permutations(dedup: DedupConfig) -> int:
    """Values of a signature in the rows of the spills: 0 if only band hashes are needed."""
    return dedup.permutations if dedup.near and (dedup.save_signatures or dedup.against) else 0


class SpillPool:
    """The spills of all parts, and those of this rank, which stay open.

    `descriptor` opens a file, which stays open until many others are opened.

    Args:
        stem: returns the path of the files of a part, without suffix.
        runs: bounds of the sorted runs of each spill.
        index: offset of the index in each spill.
    """

    def __init__(
        self, comm: Comm, stem: Callable[[int], Path], runs: Sequence[Sequence[int]], index: Sequence[int], dedup: DedupConfig
    ) -> None:
        self.stem, self._comm, self._runs, self._index = stem, comm, runs, index
        self._row, self._bands = row_type(permutations(dedup)), dedup.bands if dedup.near else 0
        self._open = lru_cache(maxsize=most_open_files())(_OpenFile)
        self.descriptor: Callable[[Path], int] = lambda path: self._open(path).descriptor
        self.starts = np.cumsum([0, *(bounds[-1] for bounds in runs)], dtype=np.int64)
        self.mine = {part: self._spilled(part) for part in range(comm.rank, len(runs), comm.size)}

    def close(self) -> None:
        """Close the files."""
        self._open.cache_clear()

    def _spilled(self, part: int) -> Spilled:
        path = self.stem(part).with_suffix(SUFFIX)
        return Spilled(lambda: self.descriptor(path), self._runs[part], self._index[part], self._row, self._bands)

    def batches(self, part: int, drop: np.ndarray, size: int) -> Iterator[tuple[np.ndarray, list[str]]]:
        """Yield (numbers in the part, texts) of a part of this rank without the dropped documents, in batches of about `size` bytes."""
        spilled = self.mine[part]
        for begin, end in pairwise(spilled.runs):
            rows = spilled.rows(begin, end)
            bounds = np.flatnonzero(np.diff(np.cumsum(rows["size"], dtype=np.int64) // size)) + 1
            for low, high in pairwise([0, *bounds.tolist(), end - begin]):
                kept = ~contained(self.starts[part] + rows["number"][low:high], drop)
                texts = [text for text, chosen in zip(spilled.records(begin + low, begin + high), kept.tolist(), strict=True) if chosen]
                if texts:
                    yield rows["number"][low:high][kept], [text.decode("utf-8") for _, text in texts]

    def numbers(self) -> np.ndarray:
        """The numbers of this rank's documents, in their order: (documents,) int64."""
        return np.concatenate([np.empty(0, np.int64), *(np.arange(self.starts[part], self.starts[part + 1]) for part in self.mine)])

    def documents(self, *, url: bool, chosen: np.ndarray | None = None) -> Documents:
        """This rank's documents in the order of their numbers.

        Args:
            url: compare URLs instead of texts.
            chosen: (documents,) bool, which of them; default: all.
        """
        lengths, keys = [np.empty(0, np.int64)], [np.empty((0, 2), np.uint64)]
        for spilled in self.mine.values():
            rows, order = spilled.rows(), spilled.order()
            lengths.append(rows["length"].astype(np.int64)[order])
            keys.append(rows["url" if url else "exact"][order])

        def of(arrays: Sequence[np.ndarray]) -> np.ndarray:
            joined = np.concatenate(arrays)
            return joined if chosen is None else joined[chosen]

        def bands(band: int) -> np.ndarray:
            return of([np.empty(0, np.uint64), *(spilled.band(band) for spilled in self.mine.values())])

        kept = of([self.numbers()])
        return Documents(
            kept, of(lengths), of(keys), bands if self._bands and not url else None, lambda i: self._signatures(kept[i]), self.texts
        )

    def _signatures(self, numbers: np.ndarray) -> np.ndarray:
        """The signatures of documents of this rank: (numbers, permutations) uint32."""
        made = np.empty((len(numbers), *self._row["minhash"].shape), dtype=np.uint32)
        for part, places in self._by_part(numbers):
            spilled = self.mine[part]
            made[places] = spilled.rows()["minhash"][spilled.order()[numbers[places] - self.starts[part]]]
        return made

    def texts(self, numbers: Sequence[int]) -> list[str]:
        """The texts of documents of this rank."""
        return [self.record(number)[1].decode("utf-8") for number in numbers]

    def record(self, number: int) -> tuple[bytes, bytes]:
        """(metadata, text) of one document, of any rank if it is one of few."""
        part = int(self.parts_of(np.array([number]))[0])
        return (self.mine.get(part) or self._spilled(part)).record(number - int(self.starts[part]))

    def parts_of(self, numbers: np.ndarray) -> np.ndarray:
        """The part of every document: (numbers,) int64."""
        return np.searchsorted(self.starts, numbers, side="right") - 1

    def holders_of(self, numbers: np.ndarray) -> np.ndarray:
        """The rank that holds every document: (numbers,) int64."""
        return self.parts_of(numbers) % self._comm.size

    def _by_part(self, numbers: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """(part, indices of its documents) for sorted or unsorted numbers of this rank."""
        parts = self.parts_of(numbers)
        return [(part, np.flatnonzero(parts == part)) for part in np.unique(parts).tolist()]

    def groups_and_sizes(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The group of the shuffle and the bytes of text of documents of this rank: two (numbers,) int64 arrays."""
        groups, sizes = np.zeros(len(numbers), dtype=np.int64), np.zeros(len(numbers), dtype=np.int64)
        for part, places in self._by_part(numbers):
            spilled = self.mine[part]
            rows = spilled.order()[numbers[places] - self.starts[part]]
            groups[places] = (spilled.shuffle_keys()[rows] >> np.uint64(KEY_BITS)).astype(np.int64)
            sizes[places] = spilled.rows()["size"][rows]
        return groups, sizes

    def tally(self, order: Order, drop: np.ndarray) -> list[Tally] | None:
        """The tally of every group of the shuffle without the dropped documents, summed over all ranks; None except on rank 0.

        The ranks share the bins of the sum, so that none receives the bins of all.

        Args:
            drop: sorted numbers of the documents of this rank to drop.
        """
        comm = self._comm
        sizes = np.zeros(order.groups * order.bins, dtype=np.int64)
        documents = np.zeros(order.groups, dtype=np.int64)
        lowest: list[tuple[int, int] | None] = [None] * order.groups
        for part, spilled in self.mine.items():
            rows = spilled.rows()
            numbers = self.starts[part] + rows["number"]
            remaining = np.flatnonzero(~contained(numbers, drop))
            keys = spilled.shuffle_keys()[remaining]
            bins = order.bin(keys)
            np.add.at(sizes, bins, rows["size"][remaining].astype(np.int64))
            groups = bins // order.bins
            documents += np.bincount(groups, minlength=order.groups)
            for group in np.unique(groups).tolist():
                within = np.flatnonzero(groups == group)
                first = within[np.lexsort((numbers[remaining[within]], keys[within]))[0]]
                candidate = (int(keys[first]), int(numbers[remaining[first]]))
                lowest[group] = min(filter(None, (lowest[group], candidate)))
        summed = []
        for group in range(order.groups):
            shares = comm.alltoall(np.array_split(sizes[group * order.bins : (group + 1) * order.bins], comm.size))
            summed.append(comm.gather(sum(shares)))
        gathered = comm.gather((documents, lowest))
        if gathered is None:
            return None
        documents = sum(entry[0] for entry in gathered)
        firsts = [min(filter(None, candidates), default=None) for candidates in zip(*(entry[1] for entry in gathered), strict=True)]
        return [Tally(int(documents[group]), np.concatenate(summed[group] or []), firsts[group]) for group in range(order.groups)]

    def find_repeated(self, drop: np.ndarray, characters: int) -> None:
        """Find the repeated paragraphs among the kept documents, and save their flags next to the spills. Collective."""
        all_of_part = {part: np.arange(self.starts[part], self.starts[part + 1]) for part in self.mine}
        remaining = {part: numbers[~contained(numbers, drop)] for part, numbers in all_of_part.items()}
        flat, counted = np.zeros(0, dtype=np.uint64), [np.zeros(0, dtype=np.int64)]
        for of_part in remaining.values():
            hashes, offsets = paragraphs.hashes((self.texts([number])[0] for number in of_part.tolist()), characters)
            flat.resize(len(flat) + len(hashes), refcheck=False)  # in place, without a second copy of all hashes
            flat[len(flat) - len(hashes) :] = hashes
            counted.append(np.diff(offsets))
        numbers = np.concatenate([np.zeros(0, dtype=np.int64), *remaining.values()])
        counts = np.concatenate(counted)
        offsets = np.concatenate([[0], np.cumsum(counts)])
        repeated = paragraphs.find_repeated(self._comm, numbers, flat, offsets)
        for part, of_part in remaining.items():
            low, high = np.searchsorted(numbers, [self.starts[part], self.starts[part + 1]]) if len(numbers) else (0, 0)
            flags = repeated[offsets[low] : offsets[high]]
            paragraphs.save_flags(self.stem(part), of_part - self.starts[part], flags, counts[low:high])


def contained(numbers: np.ndarray, drop: np.ndarray) -> np.ndarray:
    """Which numbers are in the sorted array `drop`: (numbers,) bool."""
    if not len(drop):
        return np.zeros(len(numbers), dtype=bool)
    places = np.searchsorted(drop, numbers)
    return drop[np.minimum(places, len(drop) - 1)] == numbers
