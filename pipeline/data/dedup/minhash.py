"""MinHash signatures (Broder 1997, "On the Resemblance and Containment of Documents") and what is read off them.

A document is the set of its word n-grams (shingles). Two documents resemble each other by the Jaccard index of their sets; two signatures
agree in each place with just that probability. Cut into bands (Leskovec, Rajaraman & Ullman, "Mining of Massive Datasets", section 3.4),
signatures of similar documents share a whole band: a hash of it finds candidates without comparing everything with everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from rensa import RMinHash

from pipeline.data.words import Words, mix, ngrams

SEED = 1
"""Of the permutations. Fixed, so that the signatures of any two runs compare."""

ALGORITHM = f"shingles 1, rensa RMinHash {RMinHash.ALGORITHM_VERSION}, seed {SEED}"
"""Signatures compare only with those of the same algorithm. Count up when words or shingles are hashed in another way."""

NO_WORDS = np.uint32(0xFFFFFFFF)
"""Every place of the signature of a document without any word."""

_MULTIPLIER = np.uint64(0xD1342543DE82EF95)  # of a linear congruential generator modulo 2**64 (Steele & Vigna 2021)
_CHARACTERS = 1 << 18  # a batch of shingle_sets: larger ones leave the processor's caches


def shingles(words: Words, length: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """The word n-grams of many texts. A text with fewer words has one shingle, all its words; one without words has none.

    Args:
        words: of the texts.
        length: words a shingle.

    Returns:
        flat: (shingles,) uint64 hashes, those of a text one after another, repeated ones included.
        offsets: (texts + 1,) int64: text i has flat[offsets[i]:offsets[i + 1]].
    """
    starts, ends = words.offsets[:-1], words.offsets[1:]
    counts = ends - starts
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(np.where(counts >= length, counts - length + 1, np.minimum(counts, 1)), out=offsets[1:])
    flat = np.empty(offsets[-1], dtype=np.uint64)
    whole = np.ones(len(flat), dtype=bool)
    for few in range(1, length):
        texts = np.flatnonzero(counts == few)
        if len(texts):
            flat[offsets[texts]] = ngrams(words.hashes, few)[starts[texts]]
            whole[offsets[texts]] = False
    # The shingles of whole length begin at all words but the last few of their text.
    firsts = np.arange(len(flat)) + np.repeat(starts - offsets[:-1], np.diff(offsets))
    flat[whole] = ngrams(words.hashes, length)[firsts[whole]]
    return mix(flat), offsets


def signatures(flat: np.ndarray, offsets: np.ndarray, permutations: int = 128) -> np.ndarray:
    """The signature of every text, from its shingles; their order and repetitions do not matter.

    Returns:
        (texts, permutations) uint32.
    """
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(flat, offsets.astype(np.uint64), permutations, SEED)
    texts = len(offsets) - 1
    values = chain.from_iterable(matrix.to_rows())  # the matrix has no other way out
    return np.fromiter(values, dtype=np.uint32, count=texts * permutations).reshape(texts, permutations)


def has_words(minhash: np.ndarray) -> np.ndarray:
    """Which of the (n, permutations) signatures are of a document with words: (n,) bool. The others resemble nothing."""
    return minhash.min(axis=1) != NO_WORDS


def band_hashes(minhash: np.ndarray, band: int, rows: int) -> np.ndarray:
    """A hash of one band, that is of `rows` neighbouring places, of every signature: (n,) uint64."""
    combined = np.zeros(len(minhash), dtype=np.uint64)
    for place in range(band * rows, (band + 1) * rows):
        combined *= _MULTIPLIER
        combined += minhash[:, place]
    return mix(combined)


def estimated_jaccard(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The share of equal places of two signatures each, (n, permutations): (n,), with standard deviation sqrt(J (1 - J) / permutations)."""
    return (left == right).mean(axis=1)


def shingle_sets(texts: Sequence[str], length: int) -> list[np.ndarray]:
    """The distinct shingles of every text, sorted: uint64 arrays."""
    found: list[np.ndarray] = []
    batch: list[str] = []
    characters = 0
    for number, text in enumerate(texts, 1):
        batch.append(text)
        characters += len(text)
        if characters >= _CHARACTERS or number == len(texts):
            flat, offsets = shingles(Words(batch), length)
            found += [np.unique(part) for part in np.split(flat, offsets[1:-1])]
            batch, characters = [], 0
    return found


def jaccard(left: np.ndarray, right: np.ndarray) -> float:
    """The Jaccard index of two sets of shingles (sorted, distinct); 0 for two empty ones."""
    common = len(np.intersect1d(left, right, assume_unique=True))
    return common / max(1, len(left) + len(right) - common)
