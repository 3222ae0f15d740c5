"""Steps that drop documents other than running text: the rules of Gopher, C4 and FineWeb, and limits on the length.

Gopher: Rae et al. 2021, arXiv:2112.11446, appendix A.1. C4: Raffel et al. 2020, section 2.2. FineWeb: Penedo et al. 2024, section 3.6.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np

from pipeline.config.cleaning import C4Step, FineWebStep, GopherStep, LengthStep
from pipeline.data.clean.document_batch import DocumentBatch, Step, Verdict, drop
from pipeline.data.clean.limits import Limits
from pipeline.data.clean.repetition import repeated
from pipeline.data.clean.stop_words import STOP_WORDS
from pipeline.data.words import IDEOGRAPH, LETTER, SENTENCE_END, SPACE, Lookup, Spans, Words

_BULLETS = np.array([ord(character) for character in "-*•‣▪●○–·・"])
_ELLIPSIS = ord("…")
_SPANS = 1 << 16
"""Spans whose intermediate results are in memory at once."""
_QUOTES = np.array([ord(character) for character in "…”’“」』"])


def length(knobs: LengthStep) -> Step:
    """Drop texts that are too short or too long, in characters."""

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        characters, limits = batch.characters, Limits(knobs, batch)
        return drop(batch, [(characters < limits["least"], "too short"), (characters > limits["most"], "too long")])

    return step


def gopher(knobs: GopherStep) -> Step:
    """Gopher's quality rules. Stop words are those of the text's language; languages without a list skip that rule."""

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        words, lines, limits = batch.words, batch.words.lines, Limits(knobs, batch)
        count = np.diff(words.offsets)
        divisor = np.maximum(count, 1)
        mean_length, spaced = _mean_word_length(words)
        line_count = np.maximum(np.diff(lines.offsets), 1)
        bullets = _per_text(np.isin(words.codes[lines.starts], _BULLETS), lines.offsets) / line_count
        ellipsis = _ellipses(words)
        open_lines = _per_text(np.isin(lines.ends - 1, ellipsis), lines.offsets) / line_count
        hashes = words.sum_texts(_hash_signs(words)) / divisor
        dots = words.sum_texts(ellipsis) / divisor
        alphabetic, tokens = _with_letter(words, words.tokens)
        if not spaced.all():  # a token of a script without spaces is a sentence
            alphabetic, tokens = np.where(spaced, (alphabetic, tokens), _with_letter(words, words.spans))
        missing, has_list = _stop_words_missing(batch, limits["stop_words"])
        return drop(
            batch,
            [
                (count < limits["least_words"], "too few words"),
                (count > limits["most_words"], "too many words"),
                (
                    spaced & ((mean_length < limits["least_word_length"]) | (mean_length > limits["most_word_length"])),
                    "mean word length",
                ),
                ((hashes > limits["symbols"]) | (dots > limits["symbols"]), "too many symbols"),
                (bullets > limits["bullet_lines"], "mostly bullet points"),
                (open_lines > limits["ellipsis_lines"], "many lines end in an ellipsis"),
                (alphabetic < limits["alphabetic"] * tokens, "too few words with letters"),
                (has_list & missing, "too few stop words"),
            ],
        )

    return step


def c4(knobs: C4Step) -> Step:
    """C4's page-level rules: enough sentences, no placeholder text, and optionally no curly brackets."""

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        words, limits = batch.words, Limits(knobs, batch)
        code = words.count(words.codes == ord("{")) > 0
        placeholder = np.array(["lorem ipsum" in text.lower() for text in batch.texts])
        return drop(
            batch,
            [
                (words.sum_texts(_sentence_ends(words)) < limits["least_sentences"], "too few sentences"),
                (placeholder, "lorem ipsum"),
                (code & knobs.no_curly_brackets, "curly brackets"),
            ],
        )

    return step


def fineweb(knobs: FineWebStep) -> Step:
    """FineWeb's rules for lines: enough end in punctuation, not too many are short, few are repeated, not too many lines per word."""

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        words, lines, limits = batch.words, batch.words.lines, Limits(knobs, batch)
        count = np.maximum(np.diff(lines.offsets), 1)
        closed = _per_text(words.kinds[np.maximum(lines.ends - 1, 0)] & SENTENCE_END != 0, lines.offsets)
        short = _per_text(_widths(words, lines) <= limits["short_line"][lines.texts], lines.offsets)
        many = count > 1  # the rules do not apply to a single line
        _, repeats = repeated(words, lines)
        characters = np.maximum(batch.characters - (words.sum_texts(words.newlines) - 1), 1)  # without the newlines within the text
        newlines = count / np.maximum(np.diff(words.offsets), 1)
        return drop(
            batch,
            [
                (many & (closed < limits["closed_lines"] * count), "few lines end in punctuation"),
                (many & (short > limits["short_lines"] * count), "mostly short lines"),
                (repeats > limits["duplicate_characters"] * characters, "characters in duplicate lines"),
                (many & (newlines > limits["newlines"]), "too many lines for its words"),
            ],
        )

    return step


def _per_text(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Sum the values of every text i, values[offsets[i]:offsets[i + 1]]: (texts,) int64."""
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return np.diff(sums[offsets])


def _mean_word_length(words: Words) -> tuple[np.ndarray, np.ndarray]:
    """Return for every text (the mean length of the words that spaces separate, whether they are at least half of its words)."""
    spans, count = words.spans, np.diff(words.offsets)
    if not (words.kinds & IDEOGRAPH).any():
        return _per_text(spans.lengths, words.offsets) / np.maximum(count, 1), np.ones(len(count), dtype=bool)
    spaced = words.kinds[spans.starts] & IDEOGRAPH == 0
    number = _per_text(spaced, words.offsets)
    return _per_text(spans.lengths * spaced, words.offsets) / np.maximum(number, 1), 2 * number >= count


def _hash_signs(words: Words) -> np.ndarray:
    """Positions of # signs, except those that begin a line: headings, comments and directives."""
    signs = np.flatnonzero(words.codes == ord("#"))
    if not len(signs):
        return signs
    first = np.diff(signs, prepend=-2) > 1  # the first sign of each run
    begins = (signs == 0) | (words.codes[signs - 1] == ord("\n"))
    return signs[~begins[first][np.cumsum(first) - 1]]


def _ellipses(words: Words) -> np.ndarray:
    """The last position of every ellipsis: a run of at least three dots, or of the single character."""
    dot, single = words.codes == ord("."), words.codes == _ELLIPSIS
    three = np.flatnonzero(dot[:-3] & dot[1:-2] & dot[2:-1] & ~dot[3:]) + 2  # the last character is a newline
    ends = np.flatnonzero(single[:-1] & ~single[1:])
    return np.sort(np.concatenate([three, ends])) if len(three) and len(ends) else (three if len(three) else ends)


def _with_letter(words: Words, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
    """Return for every text (the number of spans with a letter, the number of spans)."""
    matched = np.empty(len(spans), dtype=bool)
    for first in range(0, len(spans), _SPANS):
        starts, ends = spans.starts[first : first + _SPANS], spans.ends[first : first + _SPANS]
        base = starts[0]
        letters = np.zeros(ends[-1] - base + 1, dtype=np.uint32)
        np.cumsum(words.kinds[base : ends[-1]] & LETTER, out=letters[1:], dtype=np.uint32)  # LETTER is 1
        matched[first : first + _SPANS] = letters[ends - base] > letters[starts - base]
    return _per_text(matched, spans.offsets), np.diff(spans.offsets)


def _widths(words: Words, spans: Spans) -> np.ndarray:
    """(spans,) widths in columns: ideographs, Kana and Hangul syllables are two columns wide."""
    wide = (words.codes >= 0x2E80) & (words.codes <= 0xFFE6)
    if not wide.any():
        return spans.lengths
    sums = np.concatenate([[0], np.cumsum(wide)])
    return spans.lengths + sums[spans.ends] - sums[spans.starts]


def _sentence_ends(words: Words) -> np.ndarray:
    """Positions of sentence ends: of . ! ? only where whitespace, a quotation mark or the end of the text follows."""
    codes, kinds = words.codes, words.kinds
    spaced = (codes == ord(".")) | (codes == ord("!")) | (codes == ord("?"))
    closing = np.flatnonzero(spaced[:-1] & ((kinds[1:] & (SPACE | SENTENCE_END)) != 0))
    others = np.flatnonzero((kinds & SENTENCE_END != 0) & (codes > 0x500))
    others = others[~np.isin(codes[others], _QUOTES)]
    return np.sort(np.concatenate([closing, others])) if len(others) else closing


def _stop_words_missing(batch: DocumentBatch, least: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return for every text (whether it has fewer than `least` stop words, whether its language has a list)."""
    known, lists, languages = _stop_word_table()
    number = np.array([languages.get(code, -1) for code, _ in batch.languages])
    is_known, which = known.find(batch.words.hashes)
    texts = batch.words.spans.texts[is_known]
    own = lists[which, number[texts]] & (number[texts] >= 0)
    return np.bincount(texts[own], minlength=len(number)) < least, number >= 0


@cache
def _stop_word_table() -> tuple[Lookup, np.ndarray, dict[str, int]]:
    """Return all stop words, a (words, languages) bool table of membership, and the index of every language."""
    split = {code: listed.split() for code, listed in STOP_WORDS.items()}
    every = sorted({word for listed in split.values() for word in listed})
    hashes = Words([" ".join(every)]).hashes
    assert len(hashes) == len(every), "each stop word must be a single word"
    belongs = np.array([[word in listed for listed in split.values()] for word in every])
    return Lookup(hashes, bits=16), belongs[np.argsort(hashes)], {code: number for number, code in enumerate(split)}
