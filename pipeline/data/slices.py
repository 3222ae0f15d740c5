"""Slices of a large text, so that the arrays of its words are never in memory as a whole.

They take about 20 times the memory of their characters. A rule that is a sum over words or lines is computed a slice at a time.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeline.data.words import Spans, Words, mix

LARGE = 1 << 19
"""Characters from which on a text is processed in slices."""

SLICE = 1 << 16
"""Characters of a slice."""

_OVERLAP = 256
"""Characters that slices share where a rule looks at adjacent characters; none looks further."""

# Where a text is cut: no word, token, ellipsis or run of # is. A # after the cut would be taken for one that begins a line.
_SPACE = re.compile(r"\s(?=[^#])")
_MARK = re.compile(r"[,;:)\]}|=，、；：）」』】》。？！](?=[^#])")


def is_large(text: str) -> bool:
    """Whether a text is processed in slices."""
    return len(text) >= LARGE


def between_words(text: str) -> Iterator[Words]:
    """Yield the words of every slice. A slice ends behind a newline if possible, else behind a space, else behind a punctuation mark.

    The text of each is `Words.text_starts[1] - 1` characters long. A text without such a place is not cut.
    """
    start = 0
    while start < len(text):
        cut = _cut(text, start)
        yield Words([text[start:cut]])
        start = cut


def _cut(text: str, start: int) -> int:
    low, high = start + SLICE // 2, start + SLICE
    while high < len(text):
        newline = text.rfind("\n", low, high)
        if newline >= 0:
            return newline + 1
        if match := _SPACE.search(text, low, high) or _MARK.search(text, low, high):
            return match.end()
        low, high = high - 1, high + SLICE
    return len(text)


def overlapping(text: str) -> Iterator[str]:
    """Yield slices that begin with the last characters of the one before."""
    for start in range(0, max(1, len(text)), SLICE):
        yield text[max(0, start - _OVERLAP) : start + SLICE]


def of_lines(text: str) -> Iterator[tuple[int, int]]:
    """Yield the (first character, end) of slices of whole lines; a line is not cut, however long it is."""
    start = 0
    while start < len(text):
        cut = text.find("\n", start + SLICE) + 1
        yield start, cut or len(text)
        start = cut or len(text)


@dataclass(frozen=True)
class Lines:
    """The lines of a large text that are not blank, without leading and trailing whitespace, as Words.lines of a small one.

    Attributes:
        spans: their characters.
        first: (lines,) bool, those after a blank line, and the first one: they begin a paragraph.
    """

    spans: Spans
    first: np.ndarray

    @classmethod
    def of(cls, text: str) -> Lines:
        """Find the lines of a text."""
        starts, ends, first, blank, start = array("i"), array("i"), bytearray(), True, 0
        while start <= len(text):
            end = text.find("\n", start)
            end = len(text) if end < 0 else end
            line = text[start:end]
            if left := len(line.lstrip()):
                starts.append(start + len(line) - left)
                ends.append(start + len(line.rstrip()))
                first.append(blank)
            blank = not left
            start = end + 1
        return cls(as_spans(np.frombuffer(starts, np.int32), np.frombuffer(ends, np.int32)), np.frombuffer(first, bool))

    @property
    def paragraphs(self) -> Spans:
        """Lines without a blank line between them."""
        starts = np.flatnonzero(self.first)
        if not len(starts):
            return self.spans
        return as_spans(self.spans.starts[starts], self.spans.ends[np.append(starts[1:], len(self.first)) - 1])


def as_spans(starts: np.ndarray, ends: np.ndarray) -> Spans:
    """The spans of a single text."""
    return Spans(starts, ends, np.array([0, len(starts)]))


def hash_spans(text: str, spans: Spans) -> np.ndarray:
    """Hash the lower-cased characters of spans: (spans,) uint64, equal for equal spans of this text.

    Short spans have the hashes of Words.hash_spans; those of more than SLICE characters are hashed in pieces of that length.
    """
    hashes, first = np.empty(len(spans), dtype=np.uint64), 0
    while first < len(spans):
        begin = int(spans.starts[first])
        last = int(np.searchsorted(spans.ends, begin + SLICE, side="right"))
        if last <= first:
            hashes[first] = _hash_long(text, begin, int(spans.ends[first]))
            first += 1
            continue
        starts, ends = spans.starts[first:last] - begin, spans.ends[first:last] - begin
        hashes[first:last] = Words([text[begin : begin + int(ends[-1])]]).hash_spans(as_spans(starts, ends))
        first = last
    return hashes


def _hash_long(text: str, start: int, end: int) -> np.uint64:
    hashed = np.zeros(1, dtype=np.uint64)
    for begin in range(start, end, SLICE):
        piece = text[begin : min(begin + SLICE, end)]
        whole = as_spans(np.array([0], np.int32), np.array([len(piece)], np.int32))
        hashed = mix(hashed * np.uint64(3) + Words([piece]).hash_spans(whole))
    return hashed[0]
