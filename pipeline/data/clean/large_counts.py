"""The counts of counts.py for a large document, which is the only one of its batch: a slice at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline.data import slices
from pipeline.data.clean import counts
from pipeline.data.clean.counts import Counts
from pipeline.data.clean.document_batch import DocumentBatch
from pipeline.data.clean.repetition import repeated_spans
from pipeline.data.words import SPACE, Words, is_sentence_end

_BULLETS = frozenset(map(chr, counts.BULLETS))


def gopher(batch: DocumentBatch) -> Counts:
    """What Gopher's rules are about: name -> (1,)."""
    (text,) = batch.texts
    total: Counts = {}
    tokens = _Tokens()
    for words in slices.between_words(text):
        of_slice = counts.of_words(words, batch.languages, every=True)
        total = {name: total.get(name, 0) + count for name, count in of_slice.items()}
        tokens.add(words)
    total["has_stop_words"] = total.get("has_stop_words", np.zeros(1)) > 0
    spans = batch.lines.spans
    bullets = sum(text[start] in _BULLETS for start in _values(spans.starts))
    open_lines = sum(text[end - 1] == "…" or text[max(0, end - 3) : end] == "..." for end in _values(spans.ends))
    found = {"lines": len(spans), "bullets": bullets, "open_lines": open_lines, "tokens": tokens.number, "lettered_tokens": tokens.lettered}
    return {**total, **{name: np.array([count]) for name, count in found.items()}}


def sentences(batch: DocumentBatch) -> np.ndarray:
    """The number of sentences: (1,)."""
    return np.sum([counts.sentences(words) for words in slices.between_words(batch.texts[0])], axis=0)


def fineweb(batch: DocumentBatch, short_line: np.ndarray) -> Counts:
    """What FineWeb's rules are about: name -> (1,)."""
    (text,), spans = batch.texts, batch.lines.spans
    short = np.flatnonzero(spans.lengths <= short_line[0])
    columns = (_columns(text[start:end]) for start, end in zip(_values(spans.starts[short]), _values(spans.ends[short]), strict=True))
    return {
        "words": np.array([sum(len(words.spans) for words in slices.between_words(text))]),
        "newlines": np.array([text.count("\n")]),
        "lines": np.array([len(spans)]),
        "closed": np.array([sum(is_sentence_end(text[end - 1]) for end in _values(spans.ends))]),
        "short": np.array([sum(width <= short_line[0] for width in columns)]),
        "repeated_characters": repeated_spans(text, spans)[1],
    }


class _Tokens:
    """Counts the tokens of a text, and those with a letter; a slice may end within a token.

    Attributes:
        number, lettered: the counts.
    """

    def __init__(self) -> None:
        self.number = self.lettered = 0
        self._open: bool | None = None  # whether the token at the end of the last slice has a letter; None if none reaches it

    def add(self, words: Words) -> None:
        """Count those of the next slice."""
        spans = words.tokens
        if not len(spans):
            self._open = None
            return
        lettered = counts.with_letter(words, spans)
        self.number += len(spans)
        self.lettered += int(lettered.sum())
        if self._open is not None and spans.starts[0] == 0:
            self.number -= 1
            self.lettered -= bool(self._open and lettered[0])
            lettered[0] |= self._open
        self._open = bool(lettered[-1]) if words.kinds[len(words.kinds) - 2] & SPACE == 0 else None


def _columns(line: str) -> int:
    """The width of a line in columns, as counts.py has it."""
    return len(line) if line.isascii() else len(line) + sum("\u2e80" <= character <= "\uffe6" for character in line)


def _values(positions: np.ndarray) -> Iterator[int]:
    """Yield positions as int, without a list of all."""
    for first in range(0, len(positions), slices.SLICE):
        yield from positions[first : first + slices.SLICE].tolist()
