"""Words, lines and their hashes of many texts at once, in flat numpy arrays.

Rules, statistics and signatures look at every word of every document. One text at a time in Python that is some milliseconds a document;
on all texts of a batch joined together it is a few passes over an array of characters.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

LETTER, DIGIT, SPACE, IDEOGRAPH, UPPER, SENTENCE_END, HIDDEN, LEAD = (np.uint8(1 << bit) for bit in range(8))
"""Kinds of characters. A word is a run of letters (marks too) and digits; a letter of a script without spaces is a word by itself.
HIDDEN is what no text needs: control characters but tab and newline, soft hyphen, zero-width space, word joiner, byte-order mark, and
newlines other than the plain one. LEAD is what the first byte of a UTF-8 character looks like when it is read as Latin-1."""

WORD = LETTER | DIGIT

_TABLE = 0x20000  # characters from here on are ideographs, but for a few hundred that never come
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_INVERSE = pow(_BASE, -1, 1 << 64)
# Han, Kana, Thai, Lao, Burmese, Khmer: scripts that do not separate words.
_NO_SPACES = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF))


@dataclass(frozen=True)
class Spans:
    """Parts of the joined text: part j is the characters starts[j]:ends[j], and text i has the parts offsets[i]:offsets[i + 1]."""

    starts: np.ndarray
    ends: np.ndarray
    offsets: np.ndarray

    @cached_property
    def lengths(self) -> np.ndarray:
        """Characters of every part."""
        return self.ends - self.starts

    @cached_property
    def texts(self) -> np.ndarray:
        """The text that every part belongs to."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))

    def __len__(self) -> int:
        return len(self.starts)


class Words:
    """The words of many texts.

    Attributes:
        codes: (characters,) uint32, the code points of all texts, a newline after each.
        kinds: (characters,) uint8, what each is: LETTER, DIGIT, ...
        text_starts: (texts + 1,) int64, where each text begins.
        spans: the words.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.text_starts = np.cumsum([0, *(len(text) + 1 for text in texts)], dtype=np.int64)
        joined = "".join([f"{text}\n" for text in texts])
        self.codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), "<u4")
        self.kinds = _kinds().take(self.codes, mode="clip")

    @cached_property
    def spans(self) -> Spans:
        """The words of all texts, in order."""
        word = self.kinds & WORD != 0
        before, after = word.copy(), word.copy()  # whether a word goes on before and after each character
        before[1:], after[:-1] = word[:-1], word[1:]
        before[0] = after[-1] = False
        alone = np.flatnonzero(self.kinds & IDEOGRAPH)
        if len(alone):
            before[alone], before[alone[alone < len(word) - 1] + 1] = False, False
            after[alone], after[alone[alone > 0] - 1] = False, False
        return self._cut(np.flatnonzero(word & ~before), np.flatnonzero(word & ~after) + 1)

    @cached_property
    def tokens(self) -> Spans:
        """The pieces between spaces."""
        ink = self.kinds & SPACE == 0
        step = np.flatnonzero(ink[1:] != ink[:-1]) + 1
        if ink[0]:
            step = np.concatenate([[0], step])
        return self._cut(step[0::2], step[1::2])  # the last character is a newline, so every piece ends

    def _cut(self, starts: np.ndarray, ends: np.ndarray) -> Spans:
        return Spans(starts, ends, np.searchsorted(starts, self.text_starts))

    @property
    def offsets(self) -> np.ndarray:
        """(texts + 1,) int64: text i has the words offsets[i]:offsets[i + 1]."""
        return self.spans.offsets

    @cached_property
    def hashes(self) -> np.ndarray:
        """(words,) uint64, equal for equal words whatever their case."""
        return self.hash_spans(self.spans)

    @cached_property
    def newlines(self) -> np.ndarray:
        """Positions of all newlines, those after the texts included."""
        return np.flatnonzero(self.codes == ord("\n"))

    @cached_property
    def digits(self) -> np.ndarray:
        """Positions of all digits."""
        return np.flatnonzero(self.kinds & DIGIT)

    @cached_property
    def lines(self) -> Spans:
        """The lines that hold more than space, without the space around them."""
        tokens = self.tokens
        bounds = np.searchsorted(tokens.starts, self.newlines)  # pieces before each newline
        first = np.concatenate([[0], bounds[:-1]])
        some = bounds > first
        return self._cut(tokens.starts[first[some]], tokens.ends[bounds[some] - 1])

    def hash_spans(self, spans: Spans) -> np.ndarray:
        """A hash of the lower-cased characters of every span: a polynomial in _BASE modulo 2**64, read off prefix sums, and mixed.

        Returns:
            (spans,) uint64.
        """
        sums, inverses = self._prefix_sums, _powers(_INVERSE, len(self.codes) + 1)
        return mix((sums[spans.ends] - sums[spans.starts]) * inverses[spans.starts] + spans.lengths.astype(np.uint64))

    def count(self, mask: np.ndarray) -> np.ndarray:
        """How many characters of every text a (characters,) mask marks: (texts,) int64."""
        return self.sum_texts(np.flatnonzero(mask))

    def sum_texts(self, positions: np.ndarray) -> np.ndarray:
        """How many of the sorted positions lie in every text: (texts,) int64."""
        return np.diff(np.searchsorted(positions, self.text_starts))

    @cached_property
    def _prefix_sums(self) -> np.ndarray:
        """sums[k] is the polynomial of the first k characters."""
        sums = np.zeros(len(self.codes) + 1, dtype=np.uint64)
        np.cumsum(_lower_mixed().take(self.codes, mode="clip") * _powers(_BASE, len(self.codes)), out=sums[1:])
        return sums


def mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014): spreads every bit over all 64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def ngrams(hashes: np.ndarray, length: int) -> np.ndarray:
    """A hash of every `length` neighbours, those that reach from one text into the next included.

    Args:
        hashes: (n,) uint64 or uint32.

    Returns:
        (n - length + 1,) of the same type.
    """
    count = max(0, len(hashes) - length + 1)
    combined = hashes[:count].copy()
    base = hashes.dtype.type(_BASE & int(np.iinfo(hashes.dtype).max))
    for offset in range(1, length):
        combined *= base
        combined += hashes[offset : offset + count]
    return combined


class Lookup:
    """Finds which of many hashes are among some known ones. A table of bits sends most strangers away before any search."""

    def __init__(self, known: np.ndarray, bits: int = 20) -> None:
        self.known = np.unique(known)
        self._mask = np.uint64((1 << bits) - 1)
        self._filled = np.zeros(1 << bits, dtype=bool)
        self._filled[(self.known & self._mask).astype(np.int64)] = True

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(positions in `hashes` of those that are known, which of `known` each is)."""
        maybe = np.flatnonzero(self._filled[(hashes & self._mask).view(np.int64)])
        place = np.minimum(np.searchsorted(self.known, hashes[maybe]), len(self.known) - 1)
        right = self.known[place] == hashes[maybe]
        return maybe[right], place[right]


_grown: dict[int, np.ndarray] = {}


def _powers(base: int, count: int) -> np.ndarray:
    """The first powers of a number modulo 2**64; the longest table so far is kept."""
    table = _grown.get(base)
    if table is None or len(table) < count:
        table = np.full(max(count, 1 << 16), base, dtype=np.uint64)
        table[0] = 1
        _grown[base] = np.cumprod(table, dtype=np.uint64)
    return _grown[base][:count]


@cache
def _kinds() -> np.ndarray:
    """The kind of every character."""
    kinds = np.zeros(_TABLE + 1, dtype=np.uint8)
    for code in range(_TABLE):
        character = chr(code)
        category = unicodedata.category(character)
        if category[0] in "LM":
            kinds[code] = LETTER
        elif category[0] == "N":
            kinds[code] = DIGIT
        elif character.isspace():
            kinds[code] = SPACE
        if category == "Lu":
            kinds[code] |= UPPER
    for first, last in _NO_SPACES:
        kinds[first : last + 1] |= np.where(kinds[first : last + 1] & WORD, IDEOGRAPH, 0).astype(np.uint8)
    kinds[_TABLE] = LETTER | IDEOGRAPH
    for character in ".!?。！？…\"'”’»“":
        kinds[ord(character)] |= SENTENCE_END
    kinds[[*range(9), *range(11, 32), *range(0x7F, 0xA0), 0xAD, 0x200B, 0x2028, 0x2060, 0xFEFF]] |= HIDDEN
    kinds[[*range(0xC2, 0xDF), *range(0xE0, 0xF5)]] |= LEAD  # without DF, which would make N'Ko out of a German ß before a quotation mark
    return kinds


@cache
def _lower_mixed() -> np.ndarray:
    """Every character in lower case as a number of 64 random bits."""
    lower = [ord(small) if len(small := chr(code).lower()) == 1 else code for code in range(_TABLE)]
    return mix(np.array([*lower, sys.maxunicode], dtype=np.uint64) + np.uint64(1))
