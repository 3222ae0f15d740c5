"""Steps that drop documents other than running text: the rules of Gopher, C4 and FineWeb, and limits on the length.

Gopher: Rae et al. 2021, arXiv:2112.11446, appendix A.1. C4: Raffel et al. 2020, section 2.2. FineWeb: Penedo et al. 2024, section 3.6.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np

from pipeline.config.cleaning import C4Step, FineWebStep, GopherStep, LengthStep
from pipeline.data.clean.batch import Batch, Step, Verdict, drop
from pipeline.data.clean.stop_words import STOP_WORDS
from pipeline.data.words import LETTER, SENTENCE_END, SPACE, Lookup, Words

_BULLETS = np.array([ord(character) for character in "-*•‣▪●○–·"])
_ELLIPSIS = ord("…")


def length(knobs: LengthStep) -> Step:
    """Drop texts that are too short or too long, in characters."""

    def step(batch: Batch) -> Iterable[Verdict]:
        characters = batch.characters
        return drop(batch, [(characters < knobs.least, "too short"), (characters > knobs.most, "too long")])

    return step


def gopher(knobs: GopherStep) -> Step:
    """Gopher's quality rules. Stop words are those of the text's language; languages without a list skip that rule."""

    def step(batch: Batch) -> Iterable[Verdict]:
        words, lines = batch.words, batch.words.lines
        count = np.diff(words.offsets)
        divisor = np.maximum(count, 1)
        mean_length = _per_text(words.spans.lengths, words.offsets) / divisor
        line_count = np.maximum(np.diff(lines.offsets), 1)
        bullets = _per_text(np.isin(words.codes[lines.starts], _BULLETS), lines.offsets) / line_count
        ellipsis = _ellipses(words)
        open_lines = _per_text(np.isin(lines.ends - 1, ellipsis), lines.offsets) / line_count
        hashes = words.count(words.codes == ord("#")) / divisor
        dots = words.sum_texts(ellipsis) / divisor
        tokens, alphabetic = np.diff(words.tokens.offsets), _tokens_with_letter(words)
        missing, has_list = _stop_words_missing(batch, knobs.stop_words)
        return drop(
            batch,
            [
                (count < knobs.least_words, "too few words"),
                (count > knobs.most_words, "too many words"),
                ((mean_length < knobs.least_word_length) | (mean_length > knobs.most_word_length), "mean word length"),
                ((hashes > knobs.symbols) | (dots > knobs.symbols), "too many symbols"),
                (bullets > knobs.bullet_lines, "mostly bullet points"),
                (open_lines > knobs.ellipsis_lines, "many lines end in an ellipsis"),
                (alphabetic < knobs.alphabetic * tokens, "too few words with letters"),
                (has_list & missing, "too few stop words"),
            ],
        )

    return step


def c4(knobs: C4Step) -> Step:
    """C4's page-level rules: enough sentences, no placeholder text, and optionally no curly brackets."""

    def step(batch: Batch) -> Iterable[Verdict]:
        words = batch.words
        code = words.count(words.codes == ord("{")) > 0
        placeholder = np.array(["lorem ipsum" in text.lower() for text in batch.texts])
        return drop(
            batch,
            [
                (words.sum_texts(_sentence_ends(words)) < knobs.least_sentences, "too few sentences"),
                (placeholder, "lorem ipsum"),
                (code & knobs.no_curly_brackets, "curly brackets"),
            ],
        )

    return step


def fineweb(knobs: FineWebStep) -> Step:
    """FineWeb's rules for lines: enough end in punctuation, not too many are short, not too many lines per word."""

    def step(batch: Batch) -> Iterable[Verdict]:
        words, lines = batch.words, batch.words.lines
        count = np.maximum(np.diff(lines.offsets), 1)
        closed = _per_text(words.kinds[np.maximum(lines.ends - 1, 0)] & SENTENCE_END != 0, lines.offsets)
        short = _per_text(lines.lengths <= knobs.short_line, lines.offsets)
        many = count > 1  # the rules do not apply to a single line
        newlines = count / np.maximum(np.diff(words.offsets), 1)
        return drop(
            batch,
            [
                (many & (closed < knobs.closed_lines * count), "few lines end in punctuation"),
                (many & (short > knobs.short_lines * count), "mostly short lines"),
                (many & (newlines > knobs.newlines), "too many lines for its words"),
            ],
        )

    return step


def _per_text(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Sum the values of every text i, values[offsets[i]:offsets[i + 1]]: (texts,) int64."""
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values, out=sums[1:])
    return np.diff(sums[offsets])


def _ellipses(words: Words) -> np.ndarray:
    """Positions of ellipses: the single character, or the last of three dots."""
    dot = words.codes == ord(".")
    three = np.flatnonzero(dot[:-2] & dot[1:-1] & dot[2:]) + 2
    single = np.flatnonzero(words.codes == _ELLIPSIS)
    return np.sort(np.concatenate([three, single])) if len(three) and len(single) else (three if len(three) else single)


def _tokens_with_letter(words: Words) -> np.ndarray:
    """(texts,) number of whitespace-separated tokens that contain a letter."""
    tokens = words.tokens
    if not len(tokens):
        return np.zeros(len(tokens.offsets) - 1, dtype=np.int64)
    kinds = np.bitwise_or.reduceat(words.kinds, tokens.starts)  # of a token and the whitespace after it
    return _per_text(kinds & LETTER != 0, tokens.offsets)


def _sentence_ends(words: Words) -> np.ndarray:
    """Positions of periods, exclamation and question marks that whitespace, a quotation mark or the end of the text follows."""
    codes, kinds = words.codes, words.kinds
    stop = (codes == ord(".")) | (codes == ord("!")) | (codes == ord("?")) | (codes == 0x3002)
    return np.flatnonzero(stop[:-1] & (((kinds[1:] & (SPACE | SENTENCE_END)) != 0) | (codes[:-1] == 0x3002)))


def _stop_words_missing(batch: Batch, least: int) -> tuple[np.ndarray, np.ndarray]:
    """Return for every text (whether it has fewer than `least` stop words, whether its language has a list)."""
    known, lists, languages = _stop_word_table()
    number = np.array([languages.get(code, -1) for code, _ in batch.languages])
    found, which = known.find(batch.words.hashes)
    texts = batch.words.spans.texts[found]
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
