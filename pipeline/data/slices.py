"""Slices of a large text, for steps that change a line at a time: only the strings of a slice are in memory besides the text."""

from __future__ import annotations

from collections.abc import Iterator

LARGE = 1 << 19
"""Characters from which on a text is changed in slices."""

SLICE = 1 << 16
"""Characters of a slice."""


def is_large(text: str) -> bool:
    """Whether a text is changed in slices."""
    return len(text) >= LARGE


def of_lines(text: str) -> Iterator[tuple[int, int]]:
    """Yield the (first character, end) of slices of whole lines; a line is not cut, however long it is."""
    start = 0
    while start < len(text):
        cut = text.find("\n", start + SLICE) + 1
        yield start, cut or len(text)
        start = cut or len(text)
