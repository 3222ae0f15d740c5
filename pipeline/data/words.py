"""Words and lines of a batch of texts, and their hashes, in flat numpy arrays.

Rules, statistics and signatures process every word of every document. In Python, one text at a time, this takes milliseconds per
document; on the joined texts of a batch it takes a few passes over one array of characters.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

LETTER, DIGIT, SPACE, IDEOGRAPH, UPPER, SENTENCE_END, HIDDEN, LEAD = (np.uint8(1 << bit) for bit in range(8))
"""Character classes. A word is a run of letters, combining marks and digits. IDEOGRAPH marks the letters of scripts without spaces.
HIDDEN marks characters to remove: control characters except tab and newline, soft hyphen, zero-width space, word joiner, byte-order mark,
and line separators other than "\\n". LEAD marks what the first byte of a UTF-8 character becomes when it is decoded as Latin-1."""

WORD = LETTER | DIGIT

_CHUNK = 1 << 19
"""Characters whose intermediate results are in memory at once: a batch of small documents, or a piece of a large one."""

_TABLE = 0x20000  # code points from here on are treated as ideographs; a few hundred rare ones are not
_BASE = 0x9E3779B97F4A7C15  # odd, hence invertible modulo 2**64
_INVERSE = pow(_BASE, -1, 1 << 64)
# Scripts that do not separate words, in the blocks of line-breaking classes SA, AK, AS and ID (UAX #14). Alphabets: Thai and Lao, Tibetan,
# Burmese, Khmer, Tai Le and New Tai Lue, Buginese and Tai Tham, Balinese, Batak; Javanese, Cham and Tai Viet, with Burmese among them.
_TIBETAN, _JAVANESE = (0x0F00, 0x0FFF), (0xA980, 0xAADF)
_ALPHABETS = (
    *((0x0E00, 0x0EFF), _TIBETAN, (0x1000, 0x109F), (0x1780, 0x17FF), (0x1950, 0x19DF), (0x1A00, 0x1AAF), (0x1B00, 0x1B7F)),
    *((0x1BC0, 0x1BFF), _JAVANESE),
)
# Kana, Bopomofo, Han, Yi.
_SYLLABARIES = (
    *((0x3005, 0x3007), (0x3040, 0x312F), (0x31A0, 0x31BF), (0x31F0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA000, 0xA48C)),
    *((0xF900, 0xFAFF), (0xFF66, 0xFF9F)),
)
UNSPACED = "".join(f"{chr(first)}-{chr(last)}" for first, last in (*_ALPHABETS, *_SYLLABARIES, (0x1100, 0x11FF), (0xAC00, 0xD7AF)))
"""The letters that stand beside a number without a space, for a class of a regular expression; Hangul, as particles follow numbers."""

# Terminal punctuation of the scripts in use (Unicode's Sentence_Terminal, and Tibetan), with full-width forms; closing quotation marks.
_SENTENCE_ENDS = ".!?…։؟؝؞۔܀܁܂߹।॥།༎။።፧፨᙮។៕᠃᠉᥄᥅᪨᪩᪪᪫᭚᭛᭞᭟᰻᰼᱾᱿‼⁇⁈⁉꓿꘎꘏꛳꛷꡶꡷꣎꣏꤯꧈꧉꩝꩞꩟꫰꫱꯫。｡！？．" + "\"'”’»“」』"
_HAN = 0x3000
"""The code points of the syllabaries are above this one."""


@dataclass(frozen=True)
class Spans:
    """Spans of the joined text: span j has the characters starts[j]:ends[j], text i has the spans offsets[i]:offsets[i + 1]."""

    starts: np.ndarray
    ends: np.ndarray
    offsets: np.ndarray

    @cached_property
    def lengths(self) -> np.ndarray:
        """(spans,) length of every span in characters."""
        return self.ends - self.starts

    @cached_property
    def texts(self) -> np.ndarray:
        """(spans,) index of the text that contains each span."""
        return np.repeat(np.arange(len(self.offsets) - 1, dtype=np.int32), np.diff(self.offsets))

    def __len__(self) -> int:
        return len(self.starts)


class Words:
    """The words of a batch of texts.

    Scripts without spaces are cut at positions that depend on the two adjacent characters only, into words of two characters on average
    for Han, Kana and Yi, and of five for the others. Counts and n-grams of words then cover about as much text as in other languages, and
    equal passages are cut equally. Tibetan has a mark after each syllable: its words are syllables, as in Vietnamese. Hashes ignore
    case unless `exact`.

    Attributes:
        codes: (characters,) the code points of all texts, with a newline after each text, in the smallest unsigned type that holds them.
        kinds: (characters,) uint8, the character classes: LETTER, DIGIT, ...
        text_starts: (texts + 1,) int64, the first character of each text.
    """

    def __init__(self, texts: Sequence[str], *, exact: bool = False) -> None:
        self._sums: np.ndarray | None = None
        self._exact = exact
        self.text_starts = np.cumsum([0, *(len(text) + 1 for text in texts)], dtype=np.int64)
        self.codes = _code_points("".join([f"{text}\n" for text in texts]))
        self.kinds = np.empty(len(self.codes), dtype=np.uint8)
        for start in range(0, len(self.codes), _CHUNK):
            _kinds().take(self.codes[start : start + _CHUNK], mode="clip", out=self.kinds[start : start + _CHUNK])

    @cached_property
    def spans(self) -> Spans:
        """The words of all texts, in order."""
        word = self.kinds & WORD != 0
        joined = np.zeros(len(word) + 1, dtype=bool)  # whether each character continues the word of the previous one
        joined[1:-1] = word[1:] & word[:-1]
        single = np.flatnonzero(self.kinds & IDEOGRAPH)
        if len(single):
            after = single + 1
            joined[after[self.kinds[after] & IDEOGRAPH == 0]] = False  # the last character is a newline: there is always a next one
            joined[single] = self._continues(single)
        return self._as_spans(np.flatnonzero(word & ~joined[:-1]), np.flatnonzero(word & ~joined[1:]) + 1)

    def _continues(self, single: np.ndarray) -> np.ndarray:
        """Whether each of these characters of a script without spaces continues a word: (len(single),) bool."""
        before, code = self.codes[single - 1], self.codes[single]
        alphabet = (code < _HAN) | ((code >= _JAVANESE[0]) & (code <= _JAVANESE[1]))
        lengths = np.where(alphabet, np.uint64(5), np.uint64(2))  # mean length of a word
        cut = mix(before.astype(np.uint64) << np.uint64(32) | code) % lengths == 0
        cut &= (code < _TIBETAN[0]) | (code > _TIBETAN[1])
        return (self.kinds[single - 1] & IDEOGRAPH != 0) & ~cut

    @cached_property
    def tokens(self) -> Spans:
        """The whitespace-separated tokens of all texts."""
        visible = self.kinds & SPACE == 0
        bounds = np.flatnonzero(visible[1:] != visible[:-1]) + 1
        if visible[0]:
            bounds = np.concatenate([[0], bounds])
        return self._as_spans(bounds[0::2], bounds[1::2])  # the last character is a newline, so every token ends

    @cached_property
    def units(self) -> Spans:
        """The tokens; in scripts without spaces, also cut where a word begins. They have all visible characters of the texts."""
        tokens = self.tokens
        if not np.any(self.kinds & IDEOGRAPH):
            return tokens
        starts = np.union1d(tokens.starts, self.spans.starts[self.kinds[self.spans.starts] & IDEOGRAPH != 0])
        ends = tokens.ends[np.searchsorted(tokens.starts, starts, side="right") - 1]
        return self._as_spans(starts, np.minimum(ends, np.append(starts[1:], len(self.codes))))

    def _as_spans(self, starts: np.ndarray, ends: np.ndarray) -> Spans:
        offsets = np.searchsorted(starts, self.text_starts)
        kind = np.int32 if len(self.codes) < 1 << 31 else np.int64
        return Spans(starts.astype(kind, copy=False), ends.astype(kind, copy=False), offsets)

    @property
    def offsets(self) -> np.ndarray:
        """(texts + 1,) int64: text i has the words offsets[i]:offsets[i + 1]."""
        return self.spans.offsets

    @cached_property
    def hashes(self) -> np.ndarray:
        """(words,) uint64 case-insensitive hashes of the words."""
        return self.hash_spans(self.spans)

    @cached_property
    def newlines(self) -> np.ndarray:
        """Positions of all newlines, including those after the texts."""
        return np.flatnonzero(self.codes == ord("\n"))

    @cached_property
    def digits(self) -> np.ndarray:
        """Positions of all digits."""
        return np.flatnonzero(self.kinds & DIGIT)

    @cached_property
    def lines(self) -> Spans:
        """The non-blank lines, without leading and trailing whitespace."""
        tokens = self.tokens
        bounds = np.searchsorted(tokens.starts, self.newlines)  # tokens before each newline
        first = np.concatenate([[0], bounds[:-1]])
        filled = bounds > first
        return self._as_spans(tokens.starts[first[filled]], tokens.ends[bounds[filled] - 1])

    @cached_property
    def line_hashes(self) -> np.ndarray:
        """(lines,) uint64 case-insensitive hashes of the lines."""
        return self.hash_spans(self.lines)

    def hash_spans(self, spans: Spans) -> np.ndarray:
        """(spans,) uint64 hashes of sorted spans, of lower-cased characters unless exact: a polynomial in _BASE from prefix sums, mixed."""
        hashes = np.empty(len(spans), dtype=np.uint64)
        before, power, inverse = 0, 1, 1  # the prefix sum at the first character of the chunk, and the powers of _BASE and _INVERSE there
        for begin in range(0, len(self.codes), _CHUNK):
            sums, size = self._chunk_sums(begin), min(_CHUNK, len(self.codes) - begin)
            bounds = np.array([begin, begin + size], dtype=spans.starts.dtype)
            started = slice(*np.searchsorted(spans.starts, bounds))
            hashes[started] = -(sums[spans.starts[started] - begin] * np.uint64(power) + np.uint64(before))
            ended = slice(*np.searchsorted(spans.ends, bounds, side="right"))
            starts = spans.starts[ended]
            scale = _powers(_INVERSE, _CHUNK)[np.maximum(starts - begin, 0)] * np.uint64(inverse)
            if len(starts) and starts[0] < begin:  # only the first can begin in an earlier chunk
                scale[0] = pow(_INVERSE, int(starts[0]), 2**64)
            sum_of_span = hashes[ended] + sums[spans.ends[ended] - begin] * np.uint64(power) + np.uint64(before)
            hashes[ended] = mix(sum_of_span * scale + (spans.ends[ended] - starts).astype(np.uint64))
            before = (before + int(sums[-1]) * power) % 2**64
            power, inverse = power * pow(_BASE, size, 2**64) % 2**64, inverse * pow(_INVERSE, size, 2**64) % 2**64
        return hashes

    def sum_texts(self, positions: np.ndarray) -> np.ndarray:
        """Count the sorted positions that fall into every text: (texts,) int64."""
        return np.diff(np.searchsorted(positions, self.text_starts))

    def _chunk_sums(self, begin: int) -> np.ndarray:
        """sums[k] is the polynomial of the first k characters from `begin` on; those of a batch of one chunk are kept."""
        if self._sums is not None:
            return self._sums
        codes = self.codes[begin : begin + _CHUNK]
        sums = np.zeros(len(codes) + 1, dtype=np.uint64)
        mixed = _mixed(self._exact).take(codes, mode="clip")
        if self._exact and codes.itemsize == 4:
            mixed[codes >= _TABLE] = mix(codes[codes >= _TABLE].astype(np.uint64) + np.uint64(1))
        np.cumsum(mixed * _powers(_BASE, _CHUNK)[: len(codes)], out=sums[1:])
        if len(codes) == len(self.codes):
            self._sums = sums
        return sums


def _code_points(text: str) -> np.ndarray:
    """The code points of a text in the smallest unsigned type that holds them."""
    if text.isascii():
        return np.frombuffer(text.encode("ascii"), np.uint8)
    units = text.encode("utf-16-le", "surrogatepass")
    if len(units) == 2 * len(text):
        return np.frombuffer(units, "<u2")
    del units
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


def is_sentence_end(character: str) -> bool:
    """Whether a character ends a sentence, or is a closing quotation mark after one."""
    return character in _SENTENCE_ENDS


def mix(values: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64: every input bit affects all 64 output bits, and products wrap modulo 2**64.

    Steele, Lea & Flood 2014, "Fast Splittable Pseudorandom Number Generators".
    """
    values = values ^ (values >> np.uint64(30))
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def ngrams(hashes: np.ndarray, length: int) -> np.ndarray:
    """Hash every run of `length` hashes, uint64 or uint32, also across texts: (n,) -> (n - length + 1,) of the same dtype."""
    count = max(0, len(hashes) - length + 1)
    combined = hashes[:count].copy()
    base = hashes.dtype.type(_BASE & int(np.iinfo(hashes.dtype).max))
    for offset in range(1, length):
        combined *= base
        combined += hashes[offset : offset + count]
    return combined


class Lookup:
    """Tests which hashes are in a set of known hashes. A table of low bits rejects most others before the binary search."""

    def __init__(self, known: np.ndarray, bits: int = 20) -> None:
        self.known = np.unique(known)
        self._mask = np.uint64((1 << bits) - 1)
        self._filled = np.zeros(1 << bits, dtype=bool)
        self._filled[(self.known & self._mask).astype(np.int64)] = True

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (positions in `hashes` of the known ones, the index in `known` of each)."""
        candidates = np.flatnonzero(self._filled[(hashes & self._mask).view(np.int64)])
        indices = np.minimum(np.searchsorted(self.known, hashes[candidates]), len(self.known) - 1)
        equal = self.known[indices] == hashes[candidates]
        return candidates[equal], indices[equal]


@cache
def _powers(base: int, count: int) -> np.ndarray:
    """The first `count` powers of `base` modulo 2**64."""
    table = np.full(count, base, dtype=np.uint64)
    table[0] = 1
    return np.cumprod(table, dtype=np.uint64)


@cache
def _kinds() -> np.ndarray:
    """The classes of every code point."""
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
    for first, last in (*_ALPHABETS, *_SYLLABARIES):
        kinds[first : last + 1] |= np.where(kinds[first : last + 1] & WORD, IDEOGRAPH, 0).astype(np.uint8)
    kinds[_TABLE] = LETTER | IDEOGRAPH
    for character in _SENTENCE_ENDS:
        kinds[ord(character)] |= SENTENCE_END
    kinds[[*range(9), *range(11, 32), *range(0x7F, 0xA0), 0xAD, 0x200B, 0x2028, 0x2029, 0x2060, 0xFEFF]] |= HIDDEN
    kinds[[*range(0xC2, 0xDF), *range(0xE0, 0xF5)]] |= LEAD  # without DF: a German ß before a quotation mark would be decoded as N'Ko
    return kinds


@cache
def _mixed(exact: bool) -> np.ndarray:
    """A 64-bit pseudorandom number for every code point, or for its lower case."""
    lower = [ord(small) if not exact and len(small := chr(code).lower()) == 1 else code for code in range(_TABLE)]
    return mix(np.array([*lower, sys.maxunicode], dtype=np.uint64) + np.uint64(1))
