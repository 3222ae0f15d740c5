"""The step that drops texts which repeat themselves: Rae et al. 2021, arXiv:2112.11446, table A1."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pipeline.config.cleaning import RepetitionStep
from pipeline.data.clean.batch import Batch, Step, Verdict, drop
from pipeline.data.words import Spans, Words, mix, ngrams

Faults = list[tuple[np.ndarray, str]]


def repetition(knobs: RepetitionStep) -> Step:
    """Repeated lines and paragraphs, a frequent short n-gram, repeated long n-grams; as shares of the text."""

    def step(batch: Batch) -> Iterable[Verdict]:
        words, characters = batch.words, batch.characters
        faults: Faults = []
        for spans, what, share, part in (
            (words.lines, "lines", knobs.lines, knobs.line_characters),
            (_paragraphs(words), "paragraphs", knobs.paragraphs, knobs.paragraph_characters),
        ):
            count, size = _repeated(words, spans)
            faults.append((count > share * np.maximum(np.diff(spans.offsets), 1), f"repeated {what}"))
            faults.append((size > part * characters, f"characters in repeated {what}"))
        return drop(batch, [*faults, *_ngrams(batch, knobs)])

    return step


def _paragraphs(words: Words) -> Spans:
    """Runs of lines without a blank line between them."""
    lines = words.lines
    passed = np.searchsorted(words.newlines, lines.starts)
    first = np.ones(len(lines), dtype=bool)
    first[1:] = (passed[1:] - np.searchsorted(words.newlines, lines.ends[:-1]) > 1) | (np.diff(lines.texts) > 0)
    starts = np.flatnonzero(first)
    ends = np.concatenate([starts[1:], [len(lines)]]) - 1
    if not len(lines):
        return lines
    return Spans(lines.starts[starts], lines.ends[ends], np.searchsorted(starts, lines.offsets))


def _repeated(words: Words, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    """How many spans of every text are equal to an earlier one of it, and their characters."""
    again = _again(words.hash_spans(spans), spans.texts)
    texts = spans.texts[again]
    count = len(spans.offsets) - 1
    return np.bincount(texts, minlength=count), np.bincount(texts, spans.lengths[again], minlength=count)


def _again(hashes: np.ndarray, texts: np.ndarray) -> np.ndarray:
    """Positions of what has an equal before it in the same text."""
    keys = hashes ^ mix(texts.astype(np.uint64))
    order = np.argsort(keys)
    ordered = keys[order]
    bounds = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(keys) else order
    first = np.minimum.reduceat(order, bounds) if len(keys) else order
    again = np.ones(len(keys), dtype=bool)
    again[first] = False
    return np.flatnonzero(again)


def _ngrams(batch: Batch, knobs: RepetitionStep) -> Faults:
    """The rules of n-grams. What cannot break any of them is found out cheaply; only the suspects are measured."""
    words, characters = batch.words, batch.characters
    limits = [*zip((2, 3, 4), knobs.top_ngrams, strict=True)]
    shortest = min(knobs.long_ngrams)
    suspect = np.zeros(len(batch.texts), dtype=bool)
    longest = _longest_ngram(words, 5)
    for length, share in [*limits, (5, shortest)]:
        most, repeated = _repeats(words, length)
        # Whoever repeats 6 words repeats 5, so the repeated 5-grams bound all the longer ones.
        suspect |= (repeated if length == 5 else most) * longest > share * characters
    chosen = np.flatnonzero(suspect)
    if not len(chosen):
        return []
    words, characters = Words([batch.texts[index] for index in chosen]), characters[chosen]
    faults = [(_top_ngram(words, length) > share * characters, f"one frequent {length}-gram") for length, share in limits]
    for length, share in enumerate(knobs.long_ngrams, start=5):
        faults.append((_covered(words, length) > share * characters, f"repeated {length}-grams"))
    return [(_spread(mask, chosen, len(suspect)), reason) for mask, reason in faults]


def _spread(mask: np.ndarray, chosen: np.ndarray, count: int) -> np.ndarray:
    """A mask over chosen texts as one over all."""
    whole = np.zeros(count, dtype=bool)
    whole[chosen] = mask
    return whole


def _grams(words: Words, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(first word, hash, text) of every n-gram within a text."""
    hashes, texts = ngrams(words.hashes, length), words.spans.texts
    starts = np.flatnonzero(texts[: len(hashes)] == texts[length - 1 :][: len(hashes)])
    return starts, hashes[starts], texts[starts]


def _repeats(words: Words, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Upper bounds for every text: occurrences of its most frequent n-gram (0 if none comes twice), occurrences that repeat another.

    N-grams that reach into the next text are counted too, and some hashes, of 32 bits less those of the text's number, are equal by chance.
    Both are few, and count too much at worst.
    """
    count = len(words.offsets) - 1
    most, repeated = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    hashes = ngrams((words.hashes >> np.uint64(32)).astype(np.uint32), length)
    if not len(hashes):
        return most, repeated
    bits = max(1, (count - 1).bit_length())
    above = np.uint32(32 - bits)
    keys = np.sort((words.spans.texts[: len(hashes)].astype(np.uint32) << above) | (hashes >> np.uint32(bits)))
    last = np.flatnonzero(np.concatenate([keys[1:] != keys[:-1], [True]]))
    runs = np.diff(last, prepend=-1)
    often = np.flatnonzero(runs > 1)
    where = (keys[last[often]] >> above).astype(np.int64)
    np.maximum.at(most, where, runs[often])
    np.add.at(repeated, where, runs[often] - 1)
    return most, repeated


def _longest_ngram(words: Words, length: int) -> np.ndarray:
    """Characters of every text's longest n-gram, about: the last ones of a text reach into the next, and a short text counts whole."""
    spans = words.spans
    longest = np.diff(words.text_starts)
    starts = words.offsets[:-1]
    some = np.flatnonzero(np.diff(words.offsets) > length)
    if len(some):
        reach = spans.ends[length - 1 :] - spans.starts[: len(spans) - length + 1]
        longest[some] = np.maximum.reduceat(np.concatenate([reach, np.zeros(length - 1, dtype=reach.dtype)]), starts[some])
    return longest


def _top_ngram(words: Words, length: int) -> np.ndarray:
    """Characters in the occurrences of every text's n-gram that covers most; an n-gram that stands there once does not count."""
    starts, hashes, texts = _grams(words, length)
    most = np.zeros(len(words.offsets) - 1, dtype=np.int64)
    _, first, counts = np.unique(hashes ^ mix(texts.astype(np.uint64)), return_index=True, return_counts=True)
    first, counts = starts[first[counts > 1]], counts[counts > 1]
    np.maximum.at(most, words.spans.texts[first], counts * (words.spans.ends[first + length - 1] - words.spans.starts[first]))
    return most


def _covered(words: Words, length: int) -> np.ndarray:
    """Characters of the words of every text that lie in an n-gram which stands earlier in it; each word counts once."""
    starts, hashes, texts = _grams(words, length)
    again = starts[_again(hashes, texts)]
    steps = np.zeros(len(words.spans) + 1, dtype=np.int64)
    np.add.at(steps, again, 1)
    np.add.at(steps, again + length, -1)
    inside = np.flatnonzero(np.cumsum(steps[:-1]) > 0)
    return np.bincount(words.spans.texts[inside], words.spans.lengths[inside], minlength=len(words.offsets) - 1)
