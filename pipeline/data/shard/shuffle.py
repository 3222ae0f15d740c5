"""The global document shuffle, and the plan of the shards.

The shuffle key of a document is a hash of its identity. The result therefore depends only on the documents and the seed, not on the number
of ranks or the order of reading. Within a group (the training or validation split of a corpus) keys are numbers from 0 to 2**48 - 1; a
shard is a range of keys with about `data.shard_megabytes` of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import xxhash

from pipeline.data.read.documents import Document
from pipeline.data.shard.text_shards import SPLITS

KEY_BITS = 48
_HASHES = 1 << 64


@dataclass(frozen=True)
class Order:
    """The document order of a run: groups, and shuffle keys within them.

    Attributes:
        corpora: sorted names; group 2 * c + s is split s of corpus c.
        bins: number of equal key ranges of a group in which text bytes are counted, a power of two.
    """

    corpora: tuple[str, ...]
    seed: int
    validation_fraction: float
    bins: int

    @classmethod
    def plan(cls, corpora: Sequence[str], text_bytes: int, shard_megabytes: float, seed: int, validation_fraction: float) -> Order:
        """Create an order with about a thousand bins per shard, estimated from the input size; a shard consists of complete bins."""
        shards = text_bytes / (shard_megabytes * 1e6)
        bins = 1 << min(22, max(12, int(1000 * shards).bit_length()))
        return cls(tuple(sorted(set(corpora))), seed, validation_fraction, bins)

    def shuffle_key(self, document: Document) -> int:
        """The group in the upper 16 bits, the key within the group in the lower 48."""
        identity = document.id.encode("utf-8", "surrogatepass")
        key = xxhash.xxh3_64_intdigest(identity, seed=2 * self.seed) >> (64 - KEY_BITS)
        # A second, independent hash determines the split: a document keeps its split when the corpus grows.
        held_out = xxhash.xxh3_64_intdigest(identity, seed=2 * self.seed + 1) < self.validation_fraction * _HASHES
        return (2 * self.corpora.index(document.corpus) + held_out) << KEY_BITS | key

    @property
    def groups(self) -> int:
        """Number of groups of all corpora."""
        return 2 * len(self.corpora)

    def bin(self, keys: np.ndarray) -> np.ndarray:
        """The bin of every shuffle key, numbered over all groups: (n,) int64."""
        return (keys >> np.uint64(KEY_BITS - self.bins.bit_length() + 1)).astype(np.int64)

    def first_key(self, group: int, bin_in_group: int) -> int:
        """The lowest shuffle key of a bin."""
        return (group << KEY_BITS) + bin_in_group * ((1 << KEY_BITS) // self.bins)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One shard: the documents with first <= shuffle key < stop.

    Attributes:
        only: number of the single document in the shard, if it has been moved from the other split.
        without: number of a document that has been moved to another shard.
        text_bytes: approximate bytes of text.
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
    """The content of a group.

    Attributes:
        sizes: (bins,) bytes of text in every bin.
        first: (shuffle key, number) of the document with the lowest key, None for an empty group.
    """

    documents: int
    sizes: np.ndarray
    first: tuple[int, int] | None


def plan_shards(order: Order, tallies: Sequence[Tally], shard_megabytes: float) -> list[ShardPlan]:
    """Plan the shards of all groups.

    All documents of a small corpus may fall into one split. In that case the first document is moved to the other split, so that the
    training split is never empty and, with at least two documents and a fraction above zero, neither is the validation split.

    Args:
        tallies: one per group.
    """
    shards: list[ShardPlan] = []
    for number, corpus in enumerate(order.corpora):
        groups = 2 * number, 2 * number + 1
        source = _source_group(groups, tallies, order.validation_fraction > 0)
        first = None if source is None else tallies[source].first
        moved = None if first is None else first[1]
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


def _source_group(groups: tuple[int, int], tallies: Sequence[Tally], validation_wanted: bool) -> int | None:
    """The group whose first document is moved to the other split, None if no move is necessary."""
    train, validation = (tallies[group].documents for group in groups)
    if not train and validation:
        return groups[1]
    return groups[0] if train >= 2 and not validation and validation_wanted else None


def _ranges(order: Order, group: int, tally: Tally, shard_bytes: float) -> list[tuple[int, int, int]]:
    """(first key, end, bytes) of the shards of a group: their number follows from its size; equal in size up to complete bins."""
    total = int(tally.sizes.sum())
    if not tally.documents:
        return []
    count = max(1, round(total / shard_bytes))
    before = np.concatenate([[0], np.cumsum(tally.sizes)])
    cuts = np.unique([0, *np.searchsorted(before, total * np.arange(1, count) / count), order.bins])
    ranges = [(int(first), int(stop), int(before[stop] - before[first])) for first, stop in pairwise(cuts)]
    return [(order.first_key(group, first), order.first_key(group, stop), size) for first, stop, size in ranges if size]
