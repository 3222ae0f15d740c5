"""The one global shuffle: where every document goes, and which shards that makes.

A document's place is a hash of its identity. So the result depends on the documents and the seed alone: not on the number of ranks, nor on
who read what when. The places of a group of documents (a corpus's training or validation split) are numbers from 0 to 2**48; a shard is a
range of them that holds about `data.shard_megabytes` of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash

from pipeline.data.read.documents import Document

SPLITS = ("train", "validation")
PLACE_BITS = 48
_HASHES = 1 << 64


@dataclass(frozen=True)
class Order:
    """The shuffle of a run: groups, and places in them.

    Attributes:
        corpora: names, sorted; group 2 * c + s is split s of corpus c.
        bins: into so many equal ranges the places are cut to count what lies where, a power of two.
    """

    corpora: tuple[str, ...]
    seed: int
    validation_fraction: float
    bins: int

    @classmethod
    def plan(cls, corpora: Sequence[str], text_bytes: int, shard_megabytes: float, seed: int, validation_fraction: float) -> Order:
        """About a thousand bins a shard, going by the size of the input; a shard is made of whole bins."""
        shards = text_bytes / (shard_megabytes * 1e6)
        bins = 1 << min(22, max(12, int(1000 * shards).bit_length()))
        return cls(tuple(sorted(set(corpora))), seed, validation_fraction, bins)

    def place(self, document: Document) -> int:
        """The group, in the upper 16 bits, and the place in it."""
        identity = document.id.encode("utf-8", "surrogatepass")
        place = xxhash.xxh3_64_intdigest(identity, seed=2 * self.seed) >> (64 - PLACE_BITS)
        # A second, independent hash decides the split: a document stays where it is when the corpus around it grows.
        held_out = xxhash.xxh3_64_intdigest(identity, seed=2 * self.seed + 1) < self.validation_fraction * _HASHES
        return (2 * self.corpora.index(document.corpus) + held_out) << PLACE_BITS | place

    @property
    def groups(self) -> int:
        """Groups of all corpora."""
        return 2 * len(self.corpora)

    def bin(self, places: np.ndarray) -> np.ndarray:
        """The bin of every place, counted through all groups: (n,) int64."""
        return (places >> np.uint64(PLACE_BITS - self.bins.bit_length() + 1)).astype(np.int64)

    def first_place(self, group: int, bin_in_group: int) -> int:
        """The lowest place of a bin."""
        return (group << PLACE_BITS) + bin_in_group * ((1 << PLACE_BITS) // self.bins)


@dataclass(frozen=True)
class ShardPlan:
    """One shard: the documents with first <= place < stop.

    Attributes:
        only: the number of the one document that it holds instead, if any.
        without: the number of a document that another shard took.
        text_bytes: how much that is, about; for balancing the work.
    """

    name: str
    split: str
    corpus: str
    first: int
    stop: int
    text_bytes: int
    only: int | None = None
    without: int | None = None


@dataclass(frozen=True)
class Tally:
    """What a group holds.

    Attributes:
        documents: their count.
        sizes: (bins,) bytes of text in every bin.
        first: (place, number) of the document with the lowest place, None in an empty group.
    """

    documents: int
    sizes: np.ndarray
    first: tuple[int, int] | None


def plan_shards(order: Order, tallies: Sequence[Tally], shard_megabytes: float) -> list[ShardPlan]:
    """The shards that the groups become.

    The few documents of a small corpus may all fall into one split. Then the first of them moves over, so that there is always something to
    train on and, with two documents and a fraction above zero, something to validate on.

    Args:
        tallies: one a group.
    """
    shards: list[ShardPlan] = []
    for number, corpus in enumerate(order.corpora):
        groups = 2 * number, 2 * number + 1
        source = _group_that_gives(groups, tallies, order.validation_fraction > 0)
        moved = None if source is None else _first_number(tallies[source])
        for split, group in zip(SPLITS, groups, strict=True):
            if source is not None and group != source:
                ranges, only, without = _ranges(order, source, tallies[source], float("inf")), moved, None
            else:
                ranges, only, without = _ranges(order, group, tallies[group], shard_megabytes * 1e6), None, moved
                if source is not None and tallies[group].documents == 1:
                    ranges = []
            prefix = split if order.corpora == ("default",) else f"{split}-{corpus}"
            shards += [ShardPlan(f"{prefix}-{i:05d}.tar", split, corpus, *part, only, without) for i, part in enumerate(ranges)]
    return shards


def _group_that_gives(groups: tuple[int, int], tallies: Sequence[Tally], validation_wanted: bool) -> int | None:
    """The split whose first document moves to the other, if it has to."""
    train, validation = (tallies[group].documents for group in groups)
    if not train and validation:
        return groups[1]
    return groups[0] if train >= 2 and not validation and validation_wanted else None


def _first_number(tally: Tally) -> int:
    assert tally.first is not None
    return tally.first[1]


def _ranges(order: Order, group: int, tally: Tally, shard_bytes: float) -> list[tuple[int, int, int]]:
    """(first place, end, bytes) of the group's shards: as many as its size makes, as equal as its bins allow."""
    total = int(tally.sizes.sum())
    if not tally.documents:
        return []
    count = max(1, round(total / shard_bytes))
    before = np.concatenate([[0], np.cumsum(tally.sizes)])
    cuts = np.unique([0, *np.searchsorted(before, total * np.arange(1, count) / count), order.bins])
    ranges = [(int(first), int(stop), int(before[stop] - before[first])) for first, stop in pairwise(cuts)]
    return [(order.first_place(group, first), order.first_place(group, stop), size) for first, stop, size in ranges if size]
