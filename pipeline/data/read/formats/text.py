"""Text files: one document per file."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.data.read.documents import Bad, Document, ReadOptions
from pipeline.data.read.formats.checks import BYTE_ORDER_MARK, UnusableError, document_of_file, utf8
from pipeline.data.read.input_files import Span


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad]:
    """Yield the text of the file."""
    return document_of_file(span, options, lambda raw: (plain(raw), {}))


def plain(raw: bytes) -> str:
    """Decode the bytes of a text file.

    Raises:
        UnusableError: the file is not a text.
    """
    text = utf8(raw.removeprefix(BYTE_ORDER_MARK))
    if "\0" in text:
        raise UnusableError(f"is not a text: NUL at position {text.index(chr(0))}")
    return text
