"""The rules for repeated n-grams of repetition.py for a large document, which is the only one of its batch.

Of all words, 32 bits of their hashes are in memory, which give upper bounds; more only of the words of n-grams that can decide.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline.data import slices
from pipeline.data.clean.document_batch import DocumentBatch
from pipeline.data.clean.repeated_ngrams import ChosenWords
from pipeline.data.words import ngrams

Faults = list[tuple[np.ndarray, str]]

_WORD = np.dtype([("hash", "<u8"), ("start", "<i4"), ("end", "<i4")])


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
