"""Duplicate search over all ranks: exact by hash, near by MinHash, locality-sensitive hashing (LSH) and the exact Jaccard index.

The result does not depend on the number of ranks: rows are sent to the rank that their hash selects, sorted there, and the results are
merged in a fixed order. The cost of a bucket is linear: each document is compared with the first of the bucket and with its predecessor.

Memory: a search temporarily takes about 240 bytes per document, in addition to 528 for keys and signature; each duplicate takes 8 bytes
on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pipeline.common.mpi import Comm, broadcast, exchange
from pipeline.common.progress import Progress
from pipeline.config.data import DedupConfig
from pipeline.data.dedup import clusters, exact, minhash
from pipeline.data.dedup.clusters import Clusters
from pipeline.data.dedup.exact import EDGE, repeated_rows
from pipeline.data.dedup.signatures import Known

Read = Callable[[Sequence[int]], list[str]]
"""Returns the texts of documents of the corpus by their numbers, regardless of the rank that holds them."""

PAIR_BATCH = 128
"""Candidate pairs that are verified together; a text that occurs in several pairs of a batch is read once."""

ALWAYS_KEPT = np.iinfo(np.int64).max
"""The score of a document of another corpus."""

_BAND = np.dtype([("hash", "<u8"), ("number", "<i8"), ("holder", "<i4")])
_PAIR = np.dtype([("left", "<i8"), ("right", "<i8"), ("left_holder", "<i4")])


def find(
    comm: Comm,
    numbers: np.ndarray,
    keys: np.ndarray,
    signatures: np.ndarray | None,
    score: np.ndarray,
    read: Read,
    settings: DedupConfig,
    known: Known | None = None,
) -> Clusters:
    """Find the duplicates of a corpus, and which of them to drop. Collective; all ranks return the same result.

    Args:
        numbers: (n,) int64, from 0 on: the documents that this rank holds, any part of the corpus in any order.
        keys: (n, 2) uint64, equal for exact duplicates (exact.keys of the texts, or exact.url_keys).
        signatures: (n, permutations) uint32 (minhash.signatures); None compares keys only.
        score: (n,) int64; the document with the highest score of a cluster is kept, the lowest number among equals.
        read: returns texts of the corpus, to verify candidates. Not collective.
        settings: threshold, shingle, bands and rows; `exact` and `near` select the kinds of duplicates.
        known: this rank's part of the corpora in dedup.against. Their documents are kept, and their duplicates dropped. Their texts are not
            available: near duplicates are decided by the estimated Jaccard index (standard deviation 0.035 at 0.8, 128 permutations).
    """
    known = known or Known.nothing(settings.permutations)
    candidates = [np.empty(0, dtype=EDGE)]
    remaining = np.ones(len(numbers), dtype=bool)
    if settings.exact or signatures is None:
        known_score = np.full(len(known.numbers), ALWAYS_KEPT)
        columns = (known.numbers, numbers), (known.keys, keys), (known_score, score)
        copies, edges = exact.find(comm, *map(np.concatenate, columns))
        candidates.append(edges)
        remaining = ~np.isin(numbers, copies)
    if settings.near and signatures is not None:
        pairs = _candidates(comm, numbers, signatures, remaining, settings, known)
        same_corpus = pairs["left"] >= 0
        candidates.append(_verified(comm, pairs[same_corpus], read, settings))
        candidates.append(_estimated(comm, pairs[~same_corpus], numbers, signatures, settings.threshold, known))
    return _resolved(comm, np.concatenate(candidates), numbers, score)


def _candidates(
    comm: Comm, numbers: np.ndarray, signatures: np.ndarray, remaining: np.ndarray, settings: DedupConfig, known: Known
) -> np.ndarray:
    """The candidate pairs: (m,) _PAIR, each once, on the rank that holds the right (higher) document, sorted by it.

    One band at a time, every band hash is sent to the rank that it selects (20 bytes per document).

    Args:
        remaining: (n,) bool, documents that are not exact copies.
    """
    parts = [
        (known.numbers, known.signatures, minhash.has_words(known.signatures)),
        (numbers, signatures, remaining & minhash.has_words(signatures)),
    ]
    pairs = np.empty(0, dtype=_PAIR)
    for band in range(settings.bands):
        rows = np.concatenate([_band_rows(*part, band, settings.rows, comm.rank) for part in parts])
        rows = exchange(comm, rows, (rows["hash"] % np.uint64(comm.size)).astype(np.int64))
        found, holders = _bucket_pairs(rows[np.lexsort((rows["number"], rows["hash"]))])
        pairs = _distinct(np.concatenate([pairs, exchange(comm, found, holders)]))
    return pairs


def _band_rows(numbers: np.ndarray, signatures: np.ndarray, chosen: np.ndarray, band: int, band_rows: int, rank: int) -> np.ndarray:
    """The rows of the chosen documents for one band: (chosen,) _BAND."""
    rows = np.empty(int(chosen.sum()), dtype=_BAND)
    rows["hash"], rows["number"], rows["holder"] = minhash.band_hashes(signatures, band, band_rows)[chosen], numbers[chosen], rank
    return rows


def _bucket_pairs(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pair each document with the first of its bucket and with its predecessor, in rows sorted by hash and number.

    Returns:
        pairs: (m,) _PAIR, except pairs of two documents of other corpora.
        holders: (m,) the ranks that hold the right documents.
    """
    later, first = repeated_rows(rows["hash"])
    left, right = np.concatenate([first, later - 1]), np.concatenate([later, later])
    new = rows["number"][right] >= 0
    left, right = left[new], right[new]
    pairs = np.empty(len(left), dtype=_PAIR)
    pairs["left"], pairs["right"], pairs["left_holder"] = rows["number"][left], rows["number"][right], rows["holder"][left]
    return pairs, rows["holder"][right]


def _distinct(pairs: np.ndarray) -> np.ndarray:
    """The distinct pairs, sorted by right, then left."""
    pairs = pairs[np.lexsort((pairs["left"], pairs["right"]))]
    repeated, _ = repeated_rows(pairs["right"], pairs["left"])
    return np.delete(pairs, repeated)


def _verified(comm: Comm, pairs: np.ndarray, read: Read, settings: DedupConfig) -> np.ndarray:
    """Edges of the pairs whose exact Jaccard index reaches the threshold."""
    jaccard = np.empty(len(pairs))
    with Progress(len(pairs), "dedup: comparing", "pairs", comm.rank) as progress:
        for start in range(0, len(pairs), PAIR_BATCH):
            part = slice(start, start + PAIR_BATCH)
            left, right = pairs["left"][part], pairs["right"][part]
            wanted = np.union1d(left, right).tolist()
            sets = dict(zip(wanted, minhash.shingle_sets(read(wanted), settings.shingle), strict=True))
            jaccard[part] = [minhash.jaccard(sets[a], sets[b]) for a, b in zip(left.tolist(), right.tolist(), strict=True)]
            progress.advance(len(left))
    return _edges(pairs, jaccard, settings.threshold)


def _estimated(comm: Comm, pairs: np.ndarray, numbers: np.ndarray, signatures: np.ndarray, threshold: float, known: Known) -> np.ndarray:
    """Edges of the pairs with a document of another corpus: the signature is sent to the rank that holds that document's signature."""
    order = np.argsort(numbers)
    with_signature = np.dtype([*_PAIR.descr, ("signature", "<u4", signatures.shape[1:])])
    rows = np.empty(len(pairs), dtype=with_signature)
    for name in _PAIR.names or ():
        rows[name] = pairs[name]
    rows["signature"] = signatures[order[np.searchsorted(numbers, pairs["right"], sorter=order)]]
    rows = exchange(comm, rows, pairs["left_holder"])
    others = known.signatures[np.searchsorted(known.numbers, rows["left"])]
    return _edges(rows, minhash.estimated_jaccard(rows["signature"], others), threshold)


def _edges(pairs: np.ndarray, jaccard: np.ndarray, threshold: float) -> np.ndarray:
    """The pairs at or above the threshold, as (m,) EDGE."""
    enough = jaccard >= threshold
    edges = np.zeros(int(enough.sum()), dtype=EDGE)
    edges["left"], edges["right"], edges["jaccard"] = pairs["left"][enough], pairs["right"][enough], jaccard[enough]
    return edges


def _resolved(comm: Comm, edges: np.ndarray, numbers: np.ndarray, score: np.ndarray) -> Clusters:
    """Resolve the edges of all ranks. Rank 0 gathers all edges (25 bytes each) and the scores that it needs, and broadcasts the result."""
    edges = edges[edges["right"] >= 0]  # without copies within the other corpora
    edges = _on_root(comm, edges)
    requested = broadcast(comm, clusters.documents_of(edges))
    mine = np.flatnonzero(np.isin(numbers, requested))
    answers = np.stack([np.searchsorted(requested, numbers[mine]), score[mine]], axis=1)
    answers = _on_root(comm, answers)
    resolved = None
    if comm.rank == 0:
        scores = np.full(len(requested), ALWAYS_KEPT)
        scores[answers[:, 0]] = answers[:, 1]
        resolved = clusters.resolve(edges, scores)
    drop = broadcast(comm, resolved.drop if resolved else requested[:0])
    summary = comm.bcast(replace(resolved, drop=drop[:0], origin=resolved.origin[:0]) if resolved else None)
    return replace(summary, drop=drop, origin=resolved.origin if resolved else summary.origin)


def _on_root(comm: Comm, rows: np.ndarray) -> np.ndarray:
    """Gather the rows of all ranks on rank 0; the other ranks return no rows."""
    return exchange(comm, rows, np.zeros(len(rows), dtype=np.int64))
