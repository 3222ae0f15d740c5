"""Text files: one document per file."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.data.read import streams
from pipeline.data.read.documents import Bad, Document, ReadOptions
from pipeline.data.read.formats.checks import BYTE_ORDER_MARK, UnusableError, too_large, utf8
from pipeline.data.read.input_files import Span


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad]:
    """Yield the text of the file."""
    source = span.file
    with streams.open_bytes(source.path, span.section) as handle:
        raw = handle.read(options.document_bytes + 1)
    try:
        yield Document(source.name, 0, plain(raw, options), {}, source.corpus)
    except UnusableError as error:
        yield Bad(source.label, "", str(error))


def plain(raw: bytes, options: ReadOptions) -> str:
    """Decode the bytes of a text file.

    Raises:
        UnusableError: the file is too large or not a text.
    """
    if len(raw) > options.document_bytes:
        raise UnusableError(too_large(options))
    text = utf8(raw.removeprefix(BYTE_ORDER_MARK))
    if "\0" in text:
        raise UnusableError(f"is not a text: NUL at position {text.index(chr(0))}")
    return text
