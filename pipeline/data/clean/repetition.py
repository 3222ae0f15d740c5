"""The step that drops texts with repetition: Rae et al. 2021, arXiv:2112.11446, table A1."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from pipeline.config.cleaning import RepetitionStep
from pipeline.data.clean.document_batch import DocumentBatch, Step, Verdict, drop
from pipeline.data.clean.limits import Limits
from pipeline.data.words import Spans, Words, mix, ngrams

Faults = list[tuple[np.ndarray, str]]


def repetition(knobs: RepetitionStep) -> Step:
    """Drop texts by their shares of repeated lines and paragraphs, of the top short n-grams, and of repeated long n-grams."""

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        words, characters, limits = batch.words, batch.characters, Limits(knobs, batch)
        faults: Faults = []
        for spans, what, share, part in (
            (words.lines, "lines", limits["lines"], limits["line_characters"]),
            (_paragraphs(words), "paragraphs", limits["paragraphs"], limits["paragraph_characters"]),
        ):
            count, size = repeated(words, spans)
            faults.append((count > share * np.maximum(np.diff(spans.offsets), 1), f"repeated {what}"))
            faults.append((size > part * characters, f"characters in repeated {what}"))
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
    repeats = _repeat_positions(hashes, spans.texts)
    texts = spans.texts[repeats]
    count = len(spans.offsets) - 1
    return np.bincount(texts, minlength=count), np.bincount(texts, spans.lengths[repeats], minlength=count)


def _repeat_positions(hashes: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """Positions of hashes that occurred earlier in the same text."""
    order, bounds = _groups(hashes, texts)
    repeated = np.ones(len(order), dtype=bool)
    if len(order):
        repeated[np.minimum.reduceat(order, bounds)] = False
    return np.flatnonzero(repeated)


def _groups(hashes: np.ndarray, texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (an order in which equal hashes of one text are adjacent, the start of every such group)."""
    keys = hashes ^ mix(texts.astype(np.uint64)) if len(texts) and texts[-1] else hashes  # all of the first text
    order = np.argsort(keys)
    ordered = keys[order]
    begins = np.ones(len(keys), dtype=bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    return order, np.flatnonzero(begins)


def _ngrams(batch: DocumentBatch, top: np.ndarray, long: np.ndarray) -> Faults:
    """The n-gram rules. A cheap upper bound excludes most texts; only the remaining ones are measured exactly.

    Args:
        top: (texts, 3) maximum shares of the most frequent 2-, 3- and 4-gram.
        long: (texts, 6) maximum shares of repeated 5- to 10-grams.
    """
    characters, longest = batch.characters, _longest_ngram(batch.words, 5)
    faults: Faults = []
    for length, share in zip((2, 3, 4), top.T, strict=True):
        most, _ = _repeats(batch.words, length)
        chosen = np.flatnonzero(most * longest > share * characters)
        faults.append((_above(batch, chosen, _top_ngram, length, share), f"one frequent {length}-gram"))
    # A repeated 6-gram contains repeated 5-grams: the coverage of 5-grams bounds that of all longer ones.
    _, repeated = _repeats(batch.words, 5)
    least = long.min(axis=1)
    chosen = np.flatnonzero(repeated * longest > least * characters)
    chosen = np.flatnonzero(_above(batch, chosen, _covered, 5, least))
    for length, share in enumerate(long.T, start=5):
        faults.append((_above(batch, chosen, _covered, length, share), f"repeated {length}-grams"))
    return faults


def _above(
    batch: DocumentBatch, chosen: np.ndarray, measure: Callable[[Words, int], np.ndarray], length: int, share: np.ndarray
) -> np.ndarray:
    """(texts,) bool: which of the chosen texts have a measure above their (texts,) share of their characters."""
    above = np.zeros(len(batch.texts), dtype=bool)
    if len(chosen):
        words = batch.words if len(chosen) == len(batch.texts) else Words([batch.texts[index] for index in chosen])
        above[chosen] = measure(words, length) > share[chosen] * batch.characters[chosen]
    return above


def _grams(words: Words, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (first word, hash, text) of every n-gram within a text."""
    hashes, texts = ngrams(words.hashes, length), words.spans.texts
    starts = np.flatnonzero(texts[: len(hashes)] == texts[length - 1 :][: len(hashes)])
    return starts, hashes[starts], texts[starts]


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


def _top_ngram(words: Words, length: int) -> np.ndarray:
    """Characters in all occurrences of the n-gram that covers most of a text, for every text; n-grams that occur once do not count.

    Occurrences may differ in length, by the spaces and the punctuation between the words.
    """
    starts, hashes, texts = _grams(words, length)
    most = np.zeros(len(words.offsets) - 1, dtype=np.int64)
    if not len(starts):
        return most
    order, bounds = _groups(hashes, texts)
    often = np.diff(bounds, append=len(order)) > 1
    characters = np.add.reduceat((words.spans.ends[starts + length - 1] - words.spans.starts[starts])[order], bounds)
    np.maximum.at(most, texts[order[bounds[often]]], characters[often])
    return most


def _covered(words: Words, length: int) -> np.ndarray:
    """Characters of the words of every text that are in a repetition of an earlier n-gram; each word counts once."""
    starts, hashes, texts = _grams(words, length)
    repeats = starts[_repeat_positions(hashes, texts)]
    steps = np.zeros(len(words.spans) + 1, dtype=np.int64)
    np.add.at(steps, repeats, 1)
    np.add.at(steps, repeats + length, -1)
    inside = np.flatnonzero(np.cumsum(steps[:-1]) > 0)
    return np.bincount(words.spans.texts[inside], words.spans.lengths[inside], minlength=len(words.offsets) - 1)
