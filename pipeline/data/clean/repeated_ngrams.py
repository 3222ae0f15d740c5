"""The word n-grams that occur several times in a text, and the characters that they cover.

Of all words of a large document, 32 bits of their hashes are in memory, which give upper bounds; more only of the words of n-grams that can
decide.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline.data import slices
from pipeline.data.clean.document_batch import DocumentBatch
from pipeline.data.words import Words, mix, ngrams

_MULTIPLIER = ngrams(np.array([1, 0], dtype=np.uint64), 2)[0]
"""What ngrams multiplies the hash of an n-gram by before it adds that of the next word."""
Faults = list[tuple[np.ndarray, str]]
_WORD = np.dtype([("hash", "<u8"), ("start", "<i4"), ("end", "<i4")])


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


def faults(batch: DocumentBatch, top: np.ndarray, long: np.ndarray) -> Faults:
    """The n-gram rules.

    Args:
        top: (1, 3) maximum shares of the most frequent 2-, 3- and 4-gram.
        long: (1, 6) maximum shares of repeated 5- to 10-grams.
    """
    (text,), characters, found = batch.texts, int(batch.characters[0]), Faults()
    hashes, longest = _hashes(text, 5)
    for length, share in zip(range(2, 5), top[0].tolist(), strict=True):
        # Less often, no n-gram covers as much.
        values = _frequent(hashes, length, max(2, int(share * characters / longest)))
        if len(values):
            (covered,) = _chosen(text, length, values, length).most_covered(range(length, length + 1))
            found.append((covered > share * characters, f"one frequent {length}-gram"))
    values = _frequent(hashes, 5, 2)
    del hashes
    if len(values):
        for length, share, covered in zip(range(5, 11), long[0].tolist(), _chosen(text, 5, values, 10).covered(range(5, 11)), strict=True):
            if length == 5 and covered[0] <= long.min() * characters:  # those of 5-grams bound that of all longer ones
                break
            found.append((covered > share * characters, f"repeated {length}-grams"))
    return found


def _hashes(text: str, length: int) -> tuple[np.ndarray, int]:
    """Return (the upper halves of the hashes of all words, a bound of the characters of an n-gram of a length)."""
    parts, longest, before = [np.zeros(0, dtype=np.uint32)], 0, np.zeros(0, dtype=_WORD)
    for words in _words(text):
        parts.append((words["hash"] >> np.uint64(32)).astype(np.uint32))
        before = np.concatenate([before, words])
        reach = before["end"][length - 1 :] - before["start"][: max(0, len(before) - length + 1)]
        longest = max(longest, int(reach.max(initial=0)))
        before = before[max(0, len(before) - length + 1) :]
    return np.concatenate(parts), longest or len(text) + 1


def _words(text: str) -> Iterator[np.ndarray]:
    """Yield the words of every slice: (words,) _WORD, with positions in the text."""
    base = 0
    for words in slices.between_words(text):
        rows = np.empty(len(words.spans), dtype=_WORD)
        rows["hash"], rows["start"], rows["end"] = words.hashes, words.spans.starts, words.spans.ends
        rows["start"] += base
        rows["end"] += base
        base += int(words.text_starts[1]) - 1
        yield rows


def _frequent(hashes: np.ndarray, length: int, least: int) -> np.ndarray:
    """The sorted hashes of the n-grams that occur at least `least` times, and of some others."""
    ordered = ngrams(hashes, length)
    ordered.sort()
    if len(ordered) < least:
        return ordered[:0]
    often = ordered[least - 1 :] == ordered[: len(ordered) - least + 1]
    return np.unique(ordered[least - 1 :][often])


def _chosen(text: str, length: int, values: np.ndarray, reach: int) -> ChosenWords:
    """The words from the beginning of an n-gram of `values` on, `reach` of each.

    Args:
        values: sorted hashes of n-grams of `length` words, in 32 bits.
        reach: at least `length`.
    """
    kept, indices, base = [np.zeros(0, dtype=_WORD)], [np.zeros(0, dtype=np.int32)], 0
    rows, active = np.zeros(0, dtype=_WORD), np.zeros(0, dtype=bool)  # words that an n-gram of the next slice may reach

    def keep(number: int) -> None:
        nonlocal rows, active, base
        inside = np.flatnonzero(active[:number])
        kept.append(rows[inside])
        indices.append((inside + base).astype(np.int32))
        rows, active, base = rows[number:], active[number:], base + number

    for words in _words(text):
        rows = np.concatenate([rows, words])
        hashes = ngrams((rows["hash"] >> np.uint64(32)).astype(np.uint32), length)
        places = np.minimum(np.searchsorted(values, hashes), len(values) - 1)
        first = np.flatnonzero(values[places] == hashes)
        steps = np.zeros(len(rows) + 1, dtype=np.int32)
        steps[first] = 1
        np.subtract.at(steps, np.minimum(first + reach, len(rows)), 1)
        reached = np.cumsum(steps[:-1]) > 0
        reached[: len(active)] |= active
        # What an n-gram at the end of these words reaches behind them is found again, as it stays among the rows.
        active = reached
        keep(max(0, len(rows) - reach))
    keep(len(rows))
    return ChosenWords.of_large(np.concatenate(kept), np.concatenate(indices))
