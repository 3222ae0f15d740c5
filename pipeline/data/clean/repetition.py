"""The step that drops texts with repetition: Rae et al. 2021, arXiv:2112.11446, table A1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from pipeline.config.cleaning import RepetitionStep
from pipeline.data.clean.document_batch import DocumentBatch, Step, StepLimits, Verdict, drop
from pipeline.data.words import Spans, Words, mix, ngrams

_MULTIPLIER = ngrams(np.array([1, 0], dtype=np.uint64), 2)[0]
"""What ngrams multiplies the hash of an n-gram by before it adds that of the next word."""


class ChosenWords:
    """The words of the texts of a batch that are `chosen`, (texts,) bool."""

    def __init__(self, words: Words, chosen: np.ndarray) -> None:
        spans, self._count = words.spans, len(chosen)
        self._starts, self._ends, self._texts, self._hashes = spans.starts, spans.ends, spans.texts, words.hashes
        if not chosen.all():
            indices = np.flatnonzero(chosen[self._texts])
            self._starts, self._ends, self._texts, self._hashes = (
                array[indices] for array in (self._starts, self._ends, self._texts, self._hashes)
            )

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
        first = np.flatnonzero(self._texts[: len(hashes)] == self._texts[lengths[0] - 1 :][: len(hashes)])
        hashes = hashes[first]
        for length in lengths:
            members, bounds = grouped(hashes, self._texts[first])
            yield first[members], bounds
            first, hashes = first[members], hashes[members]
            within = first + length < len(self._texts)
            within[within] = self._texts[first[within] + length] == self._texts[first[within]]
            first = first[within]
            hashes = hashes[within] * _MULTIPLIER + self._hashes[first + length]


def grouped(hashes: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the hashes, (n,) uint64, that occur several times in their text, (n,) its index.

    Returns the positions of these hashes with equal ones of one text together, and the start of every such group.
    """
    keys = hashes ^ mix(texts.astype(np.uint64)) if len(texts) and texts.any() else hashes  # all of the first text
    order = np.argsort(keys)
    ordered = keys[order]
    equal = np.zeros(len(keys) + 1, dtype=bool)  # whether each key equals the one before it
    np.equal(ordered[1:], ordered[:-1], out=equal[1:-1])
    several = np.flatnonzero(equal[1:] | equal[:-1])
    return order[several], np.flatnonzero(~equal[several])


Faults = list[tuple[np.ndarray, str]]


def repetition(knobs: RepetitionStep) -> Step:
    """Drop texts by their shares of repeated lines and paragraphs, of the top short n-grams, and of repeated long n-grams."""

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        characters, limits = batch.characters, StepLimits(knobs, batch)
        lines, paragraphs = batch.words.lines, _paragraphs(batch.words)
        faults: Faults = []
        for spans, unit, share, part in (
            (lines, "lines", limits["lines"], limits["line_characters"]),
            (paragraphs, "paragraphs", limits["paragraphs"], limits["paragraph_characters"]),
        ):
            count, size = repeated(batch.words, spans)
            faults.append((count > share * np.maximum(np.diff(spans.offsets), 1), f"repeated {unit}"))
            faults.append((size > part * characters, f"characters in repeated {unit}"))
        return drop(batch, [*faults, *_ngrams(batch, limits["top_ngrams"], limits["long_ngrams"])])

    return step


def _paragraphs(words: Words) -> Spans:
    """Paragraphs: lines without a blank line between them."""
    lines = words.lines
    newlines_before = np.searchsorted(words.newlines, lines.starts)
    first = np.ones(len(lines), dtype=bool)
    first[1:] = (newlines_before[1:] - np.searchsorted(words.newlines, lines.ends[:-1]) > 1) | (np.diff(lines.texts) > 0)
    starts = np.flatnonzero(first)
    ends = np.concatenate([starts[1:], [len(lines)]]) - 1
    if not len(lines):
        return lines
    return Spans(lines.starts[starts], lines.ends[ends], np.searchsorted(starts, lines.offsets))


def repeated(words: Words, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Count the spans of every text that equal an earlier span of that text, ignoring case, and their characters."""
    hashes = words.line_hashes if spans is words.lines else words.hash_spans(spans)
    members, bounds = grouped(hashes, spans.texts)
    later = np.zeros(len(hashes), dtype=bool)
    later[members] = True
    if len(members):
        later[np.minimum.reduceat(members, bounds)] = False
    repeats = np.flatnonzero(later)
    texts = spans.texts[repeats]
    count = len(spans.offsets) - 1
    return np.bincount(texts, minlength=count), np.bincount(texts, spans.lengths[repeats], minlength=count)


def _ngrams(batch: DocumentBatch, top: np.ndarray, long: np.ndarray) -> Faults:
    """The n-gram rules. A cheap upper bound excludes most texts; only the remaining ones are measured exactly.

    Args:
        top: (texts, 3) maximum shares of the most frequent 2-, 3- and 4-gram.
        long: (texts, 6) maximum shares of repeated 5- to 10-grams.
    """
    words, characters, longest = batch.words, batch.characters, _longest_ngram(batch.words, 5)
    faults: Faults = []
    possible = {length: _repeats(words, length)[0] * longest > share * characters for length, share in zip(range(2, 5), top.T, strict=True)}
    measured = [length for length, chosen in possible.items() if chosen.any()]
    if measured:
        lengths = range(measured[0], measured[-1] + 1)
        most = ChosenWords(words, np.logical_or.reduce(list(possible.values()))).most_covered(lengths)
        for length, covered in zip(lengths, most, strict=True):
            faults.append((possible[length] & (covered > top[:, length - 2] * characters), f"one frequent {length}-gram"))
    # A repeated 6-gram contains repeated 5-grams: the coverage of 5-grams bounds that of all longer ones.
    _, repeated = _repeats(words, 5)
    least = long.min(axis=1)
    chosen = repeated * longest > least * characters
    if chosen.any():
        for length, share, covered in zip(range(5, 11), long.T, ChosenWords(words, chosen).covered(range(5, 11)), strict=True):
            if length == 5:
                chosen &= covered > least * characters
            faults.append((chosen & (covered > share * characters), f"repeated {length}-grams"))
    return faults


def _repeats(words: Words, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Upper bounds for every text: occurrences of its most frequent n-gram (0 if none is repeated), and repeated occurrences.

    N-grams that cross into the next text are counted too, and some hashes collide (32 bits minus those of the text index). Both are rare
    and can only increase the bounds.
    """
    count = len(words.offsets) - 1
    most, repeated = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    hashes = ngrams(words.hashes.view("<u4")[1::2], length)  # the upper halves
    if not len(hashes):
        return most, repeated
    bits = max(1, (count - 1).bit_length())
    above = np.uint32(32 - bits)
    keys = words.spans.texts[: len(hashes)].astype(np.uint32)
    keys <<= above  # in place: these arrays are large in a large text
    hashes >>= np.uint32(bits)
    keys |= hashes
    del hashes
    keys.sort()
    last = np.flatnonzero(np.concatenate([keys[1:] != keys[:-1], [True]])).astype(words.spans.starts.dtype)
    runs = np.diff(last, prepend=last.dtype.type(-1))
    often = np.flatnonzero(runs > 1)
    where = (keys[last[often]] >> above).astype(np.int64)
    np.maximum.at(most, where, runs[often])
    np.add.at(repeated, where, runs[often] - 1)
    return most, repeated


def _longest_ngram(words: Words, length: int) -> np.ndarray:
    """Approximate characters of the longest n-gram of every text: the last n-grams cross into the next text; short texts count fully."""
    spans = words.spans
    longest = np.diff(words.text_starts)
    starts = words.offsets[:-1]
    some = np.flatnonzero(np.diff(words.offsets) > length)
    if len(some):
        reach = spans.ends[length - 1 :] - spans.starts[: len(spans) - length + 1]
        longest[some] = np.maximum.reduceat(np.concatenate([reach, np.zeros(length - 1, dtype=reach.dtype)]), starts[some])
    return longest
