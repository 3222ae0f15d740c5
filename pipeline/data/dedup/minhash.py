"""MinHash signatures (Broder 1997, "On the Resemblance and Containment of Documents"), LSH bands and Jaccard indices.

A document is represented by the set of its word n-grams (shingles). The similarity of two documents is the Jaccard index of their sets;
each element of their signatures is equal with that probability. Signatures are divided into bands (Leskovec, Rajaraman & Ullman, "Mining of
Massive Datasets", section 3.4): similar documents are likely to share a band, so band hashes yield candidates without comparing all pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from rensa import RMinHash

from pipeline.common.texts import in_batches
from pipeline.data.words import Words, mix, ngrams

SEED = 1
"""Seed of the permutations. Fixed, so that signatures of different runs are comparable."""

ALGORITHM = f"shingles 1, rensa RMinHash {RMinHash.ALGORITHM_VERSION}, seed {SEED}"
"""Only signatures of the same algorithm are comparable. Increment the version when the hashing of words or shingles changes."""

NO_WORDS = np.uint32(0xFFFFFFFF)
"""Every element of the signature of a document without words."""

NO_BAND = np.uint64(0xFFFFFFFFFFFFFFFF)
"""In place of every band hash of a document without words, which has no near duplicates."""

_MULTIPLIER = np.uint64(0xD1342543DE82EF95)  # multiplier of a linear congruential generator modulo 2**64 (Steele & Vigna 2021)
_CHARACTERS = 1 << 18  # batch size of shingle_sets: larger batches exceed the CPU caches


def shingles(words: Words, length: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """The word n-grams of a batch of texts. A text with fewer words has one shingle of all its words; a text without words has none.

    Returns:
        flat: (shingles,) uint64 hashes in the order of the texts, including repeated ones.
        offsets: (texts + 1,) int64: text i has flat[offsets[i]:offsets[i + 1]].
    """
    starts, ends = words.offsets[:-1], words.offsets[1:]
    counts = ends - starts
    if len(counts) == 1:  # without indices of words, which take much memory in a large text
        flat = mix(ngrams(words.hashes, max(1, min(length, int(counts[0])))))
        return flat, np.array([0, len(flat)])
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(np.where(counts >= length, counts - length + 1, np.minimum(counts, 1)), out=offsets[1:])
    flat = np.empty(offsets[-1], dtype=np.uint64)
    full = np.ones(len(flat), dtype=bool)
    for few in range(1, length):
        texts = np.flatnonzero(counts == few)
        if len(texts):
            flat[offsets[texts]] = ngrams(words.hashes, few)[starts[texts]]
            full[offsets[texts]] = False
    # Shingles of full length begin at all words of a text except the last length - 1.
    firsts = np.arange(len(flat)) + np.repeat(starts - offsets[:-1], np.diff(offsets))
    flat[full] = ngrams(words.hashes, length)[firsts[full]]
    return mix(flat), offsets


def signatures(flat: np.ndarray, offsets: np.ndarray, permutations: int = 128) -> np.ndarray:
    """The signature of every text from its shingles, independent of their order and repetition: (texts, permutations) uint32."""
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(flat, offsets.astype(np.uint64), permutations, SEED)
    texts = len(offsets) - 1
    values = chain.from_iterable(matrix.to_rows())  # the only accessor of the matrix
    return np.fromiter(values, dtype=np.uint32, count=texts * permutations).reshape(texts, permutations)


def all_band_hashes(minhash: np.ndarray, bands: int, rows: int) -> np.ndarray:
    """The hashes of all bands of (n, permutations) signatures, NO_BAND for those of a document without words: (bands, n) uint64."""
    hashes = np.zeros((bands, len(minhash)), dtype=np.uint64)
    for band, combined in enumerate(hashes):  # `rows` consecutive elements
        for element in range(band * rows, (band + 1) * rows):
            combined *= _MULTIPLIER
            combined += minhash[:, element]
        hashes[band] = mix(combined)
    hashes[:, minhash.min(axis=1) == NO_WORDS] = NO_BAND
    return hashes


def estimated_jaccard(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The share of equal elements of (n, permutations) signatures: (n,), with standard deviation sqrt(J (1 - J) / permutations)."""
    return (left == right).mean(axis=1)


def shingle_sets(texts: Sequence[str], length: int) -> list[np.ndarray]:
    """The distinct shingles of every text, sorted: uint64 arrays."""
    blocks: list[np.ndarray] = []
    for batch in in_batches(texts, _CHARACTERS):
        flat, offsets = shingles(Words(batch), length)
        blocks += [np.unique(part) for part in np.split(flat, offsets[1:-1])]
    return blocks


def jaccard(left: np.ndarray, right: np.ndarray) -> float:
    """The Jaccard index of two sets of shingles (sorted, distinct); 0 if both are empty."""
    common = len(np.intersect1d(left, right, assume_unique=True))
    return common / max(1, len(left) + len(right) - common)
