"""A text file is one document."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.data.read import streams
from pipeline.data.read.documents import Bad, Document, ReadOptions
from pipeline.data.read.formats.checks import BYTE_ORDER_MARK, UnusableError, too_large, utf8
from pipeline.data.read.sources import Span


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad]:
    """The file's text."""
    source = span.source
    with streams.open_bytes(source.path) as handle:
        raw = handle.read(options.document_bytes + 1)
    try:
        yield Document(source.name, 0, plain(raw, options), {}, source.corpus)
    except UnusableError as error:
        yield Bad(source.label, "", str(error))


def plain(raw: bytes, options: ReadOptions) -> str:
    """The text of a file's bytes.

    Raises:
        UnusableError: there are too many of them, or they are no text.
    """
    if len(raw) > options.document_bytes:
        raise UnusableError(too_large(options))
    text = utf8(raw.removeprefix(BYTE_ORDER_MARK))
    if "\0" in text:
        raise UnusableError(f"is no text: a NUL stands at position {text.index(chr(0))}")
    return text
