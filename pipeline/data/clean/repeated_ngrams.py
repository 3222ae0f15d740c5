"""The word n-grams that occur several times in a text, and the characters that they cover."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline.data.words import Words, mix, ngrams

_MULTIPLIER = ngrams(np.array([1, 0], dtype=np.uint64), 2)[0]
"""What ngrams multiplies the hash of an n-gram by before it adds that of the next word."""


class ChosenWords:
    """The words of some texts of a batch.

    Args:
        words: the words of all texts.
        chosen: (texts,) bool, the texts whose words are taken.
    """

    def __init__(self, words: Words, chosen: np.ndarray) -> None:
        spans, self._count = words.spans, len(chosen)
        self._starts, self._ends, self._texts, self._hashes = spans.starts, spans.ends, spans.texts, words.hashes
        if not chosen.all():
            own = np.flatnonzero(chosen[self._texts])
            self._starts, self._ends, self._texts, self._hashes = (
                array[own] for array in (self._starts, self._ends, self._texts, self._hashes)
            )
        self._runs = self._texts  # n-grams lie within a run

    @classmethod
    def of_large(cls, words: np.ndarray, indices: np.ndarray) -> ChosenWords:
        """Some words of a single text.

        Args:
            words: (n,) with the fields hash, start and end.
            indices: (n,) sorted index of each in the text; words are adjacent if their indices are.
        """
        chosen = cls.__new__(cls)
        chosen._count, chosen._texts = 1, np.zeros(len(words), dtype=np.int8)
        chosen._starts, chosen._ends, chosen._hashes = words["start"], words["end"], words["hash"]
        chosen._runs = np.cumsum(np.diff(indices, prepend=indices[:1]) > 1, dtype=np.int32)
        return chosen

    def most_covered(self, lengths: range) -> Iterator[np.ndarray]:
        """The characters in all occurrences of the n-gram that covers most of a text, for every length: (texts,) int64.

        N-grams that occur once do not count. Occurrences may differ in length, by the spaces and the punctuation between the words.
        """
        for length, (members, bounds) in zip(lengths, self._repeated(lengths), strict=True):
            most = np.zeros(self._count, dtype=np.int64)
            if len(members):
                characters = np.add.reduceat(self._ends[members + length - 1] - self._starts[members], bounds)
                np.maximum.at(most, self._texts[members[bounds]], characters)
            yield most

    def covered(self, lengths: range) -> Iterator[np.ndarray]:
        """The characters of the words that are in a repetition of an earlier n-gram, for every length: (texts,) int64.

        Each word counts once.
        """
        for length, (members, bounds) in zip(lengths, self._repeated(lengths), strict=True):
            steps = np.zeros(len(self._texts) + 1, dtype=np.int32)  # +1 where a repetition begins, -1 behind its end
            steps[members] = 1
            if len(members):
                first = np.minimum.reduceat(members, bounds)
                steps[first] = 0
                repeats = np.flatnonzero(steps)
                steps[repeats + length] -= 1
            inside = np.flatnonzero(np.cumsum(steps[:-1]) > 0) if len(members) else members
            lengths_inside = self._ends[inside] - self._starts[inside]
            yield np.bincount(self._texts[inside], lengths_inside, minlength=self._count)

    def _repeated(self, lengths: range) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For every length n, increasing by 1: the n-grams that occur several times in their text, as `grouped` returns their first words.

        An n-gram that occurs several times begins with a shorter one that does: only those are extended. Equal hashes of 64 bits stand for
        equal n-grams; a pair of others among the 1e6 words of a large text has equal ones with a probability of 1e12 / 2**65 = 3e-8.
        """
        hashes = ngrams(self._hashes, lengths[0])
        first = np.flatnonzero(self._runs[: len(hashes)] == self._runs[lengths[0] - 1 :][: len(hashes)])
        hashes = hashes[first]
        for length in lengths:
            members, bounds = grouped(hashes, self._texts[first])
            yield first[members], bounds
            first, hashes = first[members], hashes[members]
            within = first + length < len(self._texts)
            within[within] = self._runs[first[within] + length] == self._runs[first[within]]
            first = first[within]
            hashes = hashes[within] * _MULTIPLIER + self._hashes[first + length]


def grouped(hashes: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the hashes that occur several times in their text.

    Args:
        hashes: (n,) uint64.
        texts: (n,) index of the text of each.

    Returns:
        (the positions of these hashes with equal ones of one text together, the start of every such group).
    """
    keys = hashes ^ mix(texts.astype(np.uint64)) if len(texts) and texts.any() else hashes  # all of the first text
    order = np.argsort(keys)
    ordered = keys[order]
    equal = np.zeros(len(keys) + 1, dtype=bool)  # whether each key equals the one before it
    np.equal(ordered[1:], ordered[:-1], out=equal[1:-1])
    several = np.flatnonzero(equal[1:] | equal[:-1])
    return order[several], np.flatnonzero(~equal[several])
