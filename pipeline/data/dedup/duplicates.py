"""Duplicates over all ranks: exact by hash, near by MinHash, locality-sensitive hashing and the true Jaccard index.

Nothing here depends on the number of ranks: rows travel to the rank that their hash names, are sorted there, and what they yield is merged
in one order. A bucket costs no more than its length: a document is compared with the first and with the one before it, not with all.

Memory: a search takes about 240 bytes a document for a while, beside the 528 of keys and signature; each duplicate 8 bytes on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pipeline.config.data import DedupConfig
from pipeline.data.dedup import clusters, exact, minhash
from pipeline.data.dedup.clusters import Clusters
from pipeline.data.dedup.exact import EDGE, same_as_before
from pipeline.data.dedup.signatures import Known
from pipeline.data.mpi import Comm, broadcast, exchange
from pipeline.progress import Progress

Read = Callable[[Sequence[int]], list[str]]
"""The texts of any documents of the corpus by their numbers, whichever rank holds them."""

PAIRS_AT_ONCE = 128
"""Candidates that are verified together; a text that occurs in many of them is read once for all."""

KEPT_ANYWAY = np.iinfo(np.int64).max
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
    """The duplicates of a corpus, and which of them to leave out. All ranks call this; all get the same.

    Args:
        numbers: (n,) int64, from 0 on: the documents that this rank holds, any part of the corpus in any order.
        keys: (n, 2) uint64, equal for exact duplicates (exact.keys of the texts, or exact.url_keys).
        signatures: (n, permutations) uint32 (minhash.signatures); None looks for equal keys alone.
        score: (n,) int64; the best document of a cluster stays, the lowest number among equals.
        read: texts of documents of the corpus, to verify candidates. Each rank calls it by itself.
        settings: threshold, shingle, bands and rows; exact and near say what is looked for.
        known: this rank's part of the corpora in dedup.against. Their documents stay, whatever resembles them goes. Their texts are not
            there: near duplicates of them are decided by the estimated Jaccard index (standard deviation 0.035 at 0.8, 128 permutations).
    """
    known = known or Known.nothing(settings.permutations)
    found = [np.empty(0, dtype=EDGE)]
    left = np.ones(len(numbers), dtype=bool)
    if settings.exact or signatures is None:
        anyway = np.full(len(known.numbers), KEPT_ANYWAY)
        everything = (known.numbers, numbers), (known.keys, keys), (anyway, score)
        copies, edges = exact.find(comm, *map(np.concatenate, everything))
        found.append(edges)
        left = ~np.isin(numbers, copies)
    if settings.near and signatures is not None:
        pairs = _candidates(comm, numbers, signatures, left, settings, known)
        here = pairs["left"] >= 0
        found.append(_verified(comm, pairs[here], read, settings))
        found.append(_estimated(comm, pairs[~here], numbers, signatures, settings.threshold, known))
    return _resolved(comm, np.concatenate(found), numbers, score)


def _candidates(
    comm: Comm, numbers: np.ndarray, signatures: np.ndarray, left: np.ndarray, settings: DedupConfig, known: Known
) -> np.ndarray:
    """The pairs to compare: (m,) _PAIR, each once, on the rank that holds the right (higher) one, sorted by it.

    One band at a time, every document's hash travels to the rank that it names (20 bytes a document).

    Args:
        left: (n,) bool, the documents that are not yet out as copies.
    """
    parts = [
        (known.numbers, known.signatures, minhash.has_words(known.signatures)),
        (numbers, signatures, left & minhash.has_words(signatures)),
    ]
    pairs = np.empty(0, dtype=_PAIR)
    for band in range(settings.bands):
        rows = np.concatenate([_band_rows(*part, band, settings.rows, comm.rank) for part in parts])
        rows = exchange(comm, rows, (rows["hash"] % np.uint64(comm.size)).astype(np.int64))
        found, holders = _neighbours(rows[np.lexsort((rows["number"], rows["hash"]))])
        pairs = _distinct(np.concatenate([pairs, exchange(comm, found, holders)]))
    return pairs


def _band_rows(numbers: np.ndarray, signatures: np.ndarray, chosen: np.ndarray, band: int, places: int, rank: int) -> np.ndarray:
    """The chosen documents' part in one band."""
    rows = np.empty(int(chosen.sum()), dtype=_BAND)
    rows["hash"], rows["number"], rows["holder"] = minhash.band_hashes(signatures, band, places)[chosen], numbers[chosen], rank
    return rows


def _neighbours(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In rows sorted by hash and number: each document with the first of its bucket, and with the one before it.

    Returns:
        pairs: (m,) _PAIR; those of two documents of another corpus are left out.
        holders: (m,) the ranks that hold the right ones.
    """
    later, first = same_as_before(rows["hash"])
    left, right = np.concatenate([first, later - 1]), np.concatenate([later, later])
    new = rows["number"][right] >= 0
    left, right = left[new], right[new]
    pairs = np.empty(len(left), dtype=_PAIR)
    pairs["left"], pairs["right"], pairs["left_holder"] = rows["number"][left], rows["number"][right], rows["holder"][left]
    return pairs, rows["holder"][right]


def _distinct(pairs: np.ndarray) -> np.ndarray:
    """The pairs sorted by right, then left, each once."""
    pairs = pairs[np.lexsort((pairs["left"], pairs["right"]))]
    again, _ = same_as_before(pairs["right"], pairs["left"])
    return np.delete(pairs, again)


def _verified(comm: Comm, pairs: np.ndarray, read: Read, settings: DedupConfig) -> np.ndarray:
    """Edges of the pairs whose texts resemble each other enough."""
    jaccard = np.empty(len(pairs))
    with Progress(len(pairs), "dedup: comparing", "pairs", comm.rank) as progress:
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            part = slice(start, start + PAIRS_AT_ONCE)
            left, right = pairs["left"][part], pairs["right"][part]
            wanted = np.union1d(left, right).tolist()
            sets = dict(zip(wanted, minhash.shingle_sets(read(wanted), settings.shingle), strict=True))
            jaccard[part] = [minhash.jaccard(sets[a], sets[b]) for a, b in zip(left.tolist(), right.tolist(), strict=True)]
            progress.advance(len(left))
    return _edges(pairs, jaccard, settings.threshold)


def _estimated(comm: Comm, pairs: np.ndarray, numbers: np.ndarray, signatures: np.ndarray, threshold: float, known: Known) -> np.ndarray:
    """Edges of the pairs with a document of another corpus: the new one's signature travels to where the other's is."""
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
    """What the edges of all ranks make. Rank 0 holds them all (25 bytes each), asks for the scores it needs, and tells the others."""
    edges = edges[edges["right"] >= 0]  # not the copies within the other corpora
    edges = _on_root(comm, edges)
    asked = broadcast(comm, clusters.documents_of(edges))
    mine = np.flatnonzero(np.isin(numbers, asked))
    answers = np.stack([np.searchsorted(asked, numbers[mine]), score[mine]], axis=1)
    answers = _on_root(comm, answers)
    found = None
    if comm.rank == 0:
        scores = np.full(len(asked), KEPT_ANYWAY)
        scores[answers[:, 0]] = answers[:, 1]
        found = clusters.resolve(edges, scores)
    drop = broadcast(comm, found.drop if found else asked[:0])
    few = comm.bcast(replace(found, drop=drop[:0]) if found else None)
    return replace(few, drop=drop)


def _on_root(comm: Comm, rows: np.ndarray) -> np.ndarray:
    """The rows of all ranks on rank 0, none elsewhere."""
    return exchange(comm, rows, np.zeros(len(rows), dtype=np.int64))
