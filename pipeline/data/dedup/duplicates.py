"""Duplicate search over all ranks: exact by hash, near by MinHash, locality-sensitive hashing (LSH) and the exact Jaccard index.

The result does not depend on the number of ranks. The rows of a band are sorted over all ranks, which also divides a frequent band hash,
and the cost of a bucket is linear: each document is compared with the best of the bucket and with its predecessor. A document is dropped
only if it is a duplicate of one that is kept; since the best of a bucket may be dropped, the kept documents of chains are compared again,
among themselves, until there is no further pair. Texts of compared documents, and what is decided of a document, are exchanged; no rank
holds more than its share of documents, pairs and edges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.common.mpi import Comm, exchange
from pipeline.common.progress import Progress
from pipeline.config.data import DedupConfig
from pipeline.data.dedup import clusters, distributed, exact, minhash
from pipeline.data.dedup.clusters import Clusters
from pipeline.data.dedup.exact import EDGE, repeated_rows
from pipeline.data.dedup.signatures import Known

PAIR_BATCH, BATCH_CHARACTERS = 4096, 1 << 24
"""Candidate pairs that a rank verifies together, and the characters of their texts; a text of several pairs of a batch is read once."""

SLICE_ROWS = 1 << 22
"""Approximate number of documents of which a rank sends the hashes of a band at a time: 36 bytes each, about five times in memory."""

ALWAYS_KEPT = np.iinfo(np.int64).max
"""The length of a document of another corpus."""

_BAND = np.dtype([("hash", "<u8"), ("shortness", "<i8"), ("number", "<i8"), ("holder", "<i4")])
"""A document in a band. In the order of these fields the best document of a bucket is the first; shortness is the negative length."""
_PAIR = np.dtype([name for name in EDGE.descr if name[0] not in ("jaccard", "exact")])

Source = tuple[Callable[[int], np.ndarray], np.ndarray, np.ndarray, np.ndarray]
"""Of the documents of a corpus: the hashes of a band, numbers, lengths, and which of them to compare, (n,) each."""


@dataclass(frozen=True)
class Documents:
    """The documents that a rank holds, any part of the corpus in any order.

    Attributes:
        numbers: (n,) int64, from 0 on.
        lengths: (n,) int64, characters of text; the longest document of a cluster is kept, the lowest number among equals.
        keys: (n, 2) uint64, equal for exact duplicates (exact.keys of the texts, or of the URLs).
        bands: returns the hashes of a band, (n,) uint64, minhash.NO_BAND for a document without words; None compares keys only.
        signatures: returns (m, permutations) uint32 for indices of documents; only called with dedup.against.
        read: returns texts of these documents by their numbers.
    """

    numbers: np.ndarray
    lengths: np.ndarray
    keys: np.ndarray
    bands: Callable[[int], np.ndarray] | None
    signatures: Callable[[np.ndarray], np.ndarray]
    read: Callable[[Sequence[int]], list[str]]


def find(comm: Comm, documents: Documents, settings: DedupConfig, known: Known | None = None) -> Clusters:
    """Find the duplicates of a corpus, and which of them to drop. Collective.

    Args:
        settings: threshold, shingle, bands and rows; `exact` and `near` select the kinds of duplicates.
        known: this rank's part of the corpora in dedup.against. Their documents are kept, and their duplicates dropped. Their texts are not
            available: near duplicates are decided by the estimated Jaccard index (standard deviation 0.035 at 0.8, 128 permutations).
    """
    known = known or Known.nothing(settings.permutations)
    known_length = np.full(len(known.numbers), ALWAYS_KEPT)
    copies = near = stars = np.empty(0, dtype=EDGE)
    remaining, known_remaining = (np.ones(len(numbers), dtype=bool) for numbers in (documents.numbers, known.numbers))
    if settings.exact or documents.bands is None:
        columns = (known.numbers, documents.numbers), (known.keys, documents.keys), (known_length, documents.lengths)
        edges = exact.find(comm, *map(np.concatenate, columns))
        copies = edges[edges["right"] >= 0]  # without copies within the other corpora
        remaining = ~np.isin(documents.numbers, copies["right"])
    compared = np.empty(0, dtype=_PAIR)
    known_bands = minhash.all_band_hashes(known.signatures, settings.bands, settings.rows)
    search = settings.near
    while search and documents.bands is not None:
        sources = (
            (known_bands.__getitem__, known.numbers, known_length, known_remaining),
            (documents.bands, documents.numbers, documents.lengths, remaining),
        )
        pairs = _without(_candidates(comm, sources, settings.bands), compared)
        compared, same_corpus = np.concatenate([compared, pairs]), pairs["left"] >= 0
        verified = _verified(comm, pairs[same_corpus], documents, settings)
        near = np.concatenate([near, verified, _estimated(comm, pairs[~same_corpus], documents, settings.threshold, known)])
        stars, kept = clusters.near_stars(comm, near)
        remaining, known_remaining = (np.isin(numbers, kept) for numbers in (documents.numbers, known.numbers))
        # A document that is kept although it is the worse one of a pair may be a duplicate of one that it was not compared with.
        search = any(comm.allgather(len(pairs) > 0)) and any(comm.allgather(bool(np.isin(near["right"], kept).any())))
    return clusters.resolve(comm, copies, near, stars)


def _candidates(comm: Comm, sources: Sequence[Source], bands: int) -> np.ndarray:
    """The candidate pairs: (m,) _PAIR, each once, left the better document, on the rank that holds the right one, sorted by it."""
    count = distributed.slices(comm, sum(len(numbers) for _, numbers, _, _ in sources), SLICE_ROWS)
    pairs = np.empty(0, dtype=_PAIR)
    for band in range(bands):
        columns = [(hashes(band), numbers, lengths, chosen) for hashes, numbers, lengths, chosen in sources]
        for part in range(count):
            rows = np.concatenate([_band_rows(*of_source, part, count, comm.rank) for of_source in columns])
            rows = distributed.sorted_over_ranks(comm, rows, ("hash", "shortness", "number"))
            bucket_pairs = _bucket_pairs(*_with_predecessors(comm, rows))
            pairs = np.concatenate([pairs, exchange(comm, bucket_pairs, bucket_pairs["right_holder"])])
            pairs = pairs[np.lexsort((pairs["left"], pairs["right"]))]
            pairs = np.delete(pairs, repeated_rows(pairs["right"], pairs["left"])[0])
    return pairs


def _band_rows(
    hashes: np.ndarray, numbers: np.ndarray, lengths: np.ndarray, chosen: np.ndarray, part: int, parts: int, rank: int
) -> np.ndarray:
    """The rows of the chosen documents for one slice of a band: (m,) _BAND."""
    mine = np.flatnonzero(chosen & (hashes != minhash.NO_BAND) & (distributed.slice_of(hashes, parts) == part))
    rows = np.empty(len(mine), dtype=_BAND)
    rows["hash"], rows["shortness"], rows["number"], rows["holder"] = hashes[mine], -lengths[mine], numbers[mine], rank
    return rows


def _with_predecessors(comm: Comm, rows: np.ndarray) -> tuple[np.ndarray, int]:
    """Precede the rows of this rank by the first and the last row of its first bucket on lower ranks, if the bucket begins there.

    Args:
        rows: this rank's range of the rows, sorted over all ranks.

    Returns:
        rows: with the preceding ones.
        number: of preceding rows, at most two.
    """
    ends = rows[:0]
    if len(rows):
        ends = rows[[0, int(np.searchsorted(rows["hash"], rows["hash"][-1])), -1]]  # first, first of the last bucket, last
    bucket = rows[:0]
    for first, first_of_last, last in filter(len, comm.allgather(ends)[: comm.rank]):
        continues = len(bucket) and bucket["hash"][0] == last["hash"] == first["hash"]
        bucket = np.array([bucket[0] if continues else first_of_last, last], dtype=rows.dtype)
    if not len(rows) or not len(bucket) or bucket["hash"][0] != rows["hash"][0]:
        return rows, 0
    bucket = bucket[:1] if bucket["number"][0] == bucket["number"][1] else bucket
    return np.concatenate([bucket, rows]), len(bucket)


def _bucket_pairs(rows: np.ndarray, preceding: int) -> np.ndarray:
    """Pair each document with the first of its bucket and with its predecessor, in sorted rows: (m,) _PAIR.

    The first `preceding` rows are of lower ranks, and are paired there. Pairs of two documents of other corpora are left out.
    """
    later, first = repeated_rows(rows["hash"])
    third = later[first != later - 1]  # of a second document, the first one and the predecessor are the same
    left, right = np.concatenate([first, third - 1]), np.concatenate([later, third])
    new = (rows["number"][right] >= 0) & (right >= preceding)
    left, right = left[new], right[new]
    pairs = np.empty(len(left), dtype=_PAIR)
    for side, places in (("left", left), ("right", right)):
        pairs[side] = rows["number"][places]
        pairs[f"{side}_length"], pairs[f"{side}_holder"] = -rows["shortness"][places], rows["holder"][places]
    return pairs


def _without(pairs: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The pairs that are not among `others`; both are distinct."""
    columns = [np.concatenate([others[side], pairs[side]]) for side in ("right", "left")]
    order = np.lexsort(columns[::-1])
    repeated, _ = repeated_rows(*(column[order] for column in columns))
    return np.delete(pairs, order[repeated] - len(others))


def _verified(comm: Comm, pairs: np.ndarray, documents: Documents, settings: DedupConfig) -> np.ndarray:
    """Edges of the pairs whose exact Jaccard index reaches the threshold. The text of the left document is fetched from its rank."""
    jaccard = np.empty(len(pairs))
    batches = _batches(pairs)
    with Progress(len(pairs), "dedup: comparing", "pairs", comm.rank) as progress:
        for turn in range(max(comm.allgather(len(batches)))):
            batch = batches[turn] if turn < len(batches) else slice(0, 0)
            left, right = pairs["left"][batch], pairs["right"][batch]
            distinct, places = np.unique(left, return_index=True)
            here = pairs["left_holder"][batch][places] == comm.rank
            others = distributed.fetch(comm, distinct[~here], pairs["left_holder"][batch][places][~here], documents.read)
            local = np.union1d(distinct[here], right)
            texts = [*others, *documents.read(local.tolist())]
            numbers = [*distinct[~here].tolist(), *local.tolist()]
            sets = dict(zip(numbers, minhash.shingle_sets(texts, settings.shingle), strict=True))
            jaccard[batch] = [minhash.jaccard(sets[a], sets[b]) for a, b in zip(left.tolist(), right.tolist(), strict=True)]
            progress.advance(len(left))
    return _edges(pairs, jaccard, settings.threshold)


def _batches(pairs: np.ndarray) -> list[slice]:
    """Divide pairs into batches of at most PAIR_BATCH pairs and about BATCH_CHARACTERS characters."""
    total = np.cumsum(pairs["left_length"] + pairs["right_length"])
    batches, start, before = [], 0, 0
    while start < len(pairs):
        end = min(start + PAIR_BATCH, max(start + 1, int(np.searchsorted(total, before + BATCH_CHARACTERS, side="right"))))
        batches.append(slice(start, end))
        start, before = end, int(total[end - 1])
    return batches


def _estimated(comm: Comm, pairs: np.ndarray, documents: Documents, threshold: float, known: Known) -> np.ndarray:
    """Edges of the pairs with a document of another corpus: the signature is sent to the rank that holds that document's signature."""
    order = np.argsort(documents.numbers)
    rows = np.empty(len(pairs), dtype=[*_PAIR.descr, ("signature", "<u4", known.signatures.shape[1:])])
    for name in _PAIR.names or ():
        rows[name] = pairs[name]
    if any(comm.allgather(len(pairs) > 0)):
        rows["signature"] = documents.signatures(order[np.searchsorted(documents.numbers, pairs["right"], sorter=order)])
    rows = exchange(comm, rows, pairs["left_holder"])
    others = known.signatures[np.searchsorted(known.numbers, rows["left"])]
    return _edges(rows, minhash.estimated_jaccard(rows["signature"], others), threshold)


def _edges(pairs: np.ndarray, jaccard: np.ndarray, threshold: float) -> np.ndarray:
    """The pairs at or above the threshold, as (m,) EDGE."""
    enough = np.flatnonzero(jaccard >= threshold)
    edges = np.zeros(len(enough), dtype=EDGE)
    for name in _PAIR.names or ():
        edges[name] = pairs[name][enough]
    edges["jaccard"] = jaccard[enough]
    return edges
