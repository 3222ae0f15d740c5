"""Documents out of files: JSON lines (plain, gzip, Zstandard), or one text file a document."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import zstandard

from pipeline.data.sources import Source, Span
from pipeline.errors import UserError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

META_BYTES = 1024
"""Further fields of a JSON line travel with the document when their JSON is no longer than this."""


@dataclass(frozen=True)
class Document:
    """One text and where it came from.

    Attributes:
        source: name of the input file.
        offset: byte at which the document begins in the (decompressed) file; with `source` its identity.
        text: UTF-8.
        meta: the small fields of its JSON line besides the text.
    """

    source: str
    offset: int
    text: bytes
    meta: dict[str, Any]

    @property
    def id(self) -> str:
        """The identity as one text."""
        return f"{self.source}:{self.offset}"


class BadDocumentError(Exception):
    """What is wrong with one document; read() adds file and line."""


def read(span: Span, text_field: str) -> Iterator[Document]:
    """The documents that begin in a span, in the file's order. Empty ones are included.

    Raises:
        UserError: a document cannot be used, or the file is damaged; file, line and reason are named.
    """
    source, offset = span.source, span.start
    try:
        with _open(source) as handle:
            if _is_json_lines(source):
                for offset, line in _lines(handle, span):
                    if not line.isspace():
                        yield _from_json(source, offset, line, text_field)
            else:
                text = handle.read().removeprefix(BYTE_ORDER_MARK)
                _decoded(text)
                yield Document(source.name, 0, text, {})
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise UserError.of("data.input", source.path, f"is damaged or cut short: {error}", "fetch or compress it again") from error
    except BadDocumentError as error:
        where = f"{source.path}, line {_line_number(source, offset)}" if _is_json_lines(source) else str(source.path)
        raise UserError.of("data.input", where, str(error), "mend or remove the document, or leave the file out by data.exclude") from error


def _is_json_lines(source: Source) -> bool:
    return source.name.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl")


def _open(source: Source) -> IO[bytes]:
    """The file's bytes, decompressed."""
    if source.name.endswith(".gz"):
        return io.BufferedReader(gzip.GzipFile(source.path, "rb"), 1 << 20)
    if source.name.endswith(".zst"):
        return io.BufferedReader(_ZstdFile(open(source.path, "rb")), 1 << 20)
    return open(source.path, "rb", buffering=1 << 20)


class _ZstdFile(io.RawIOBase):
    """A Zstandard file of any number of frames. Unlike zstandard's own reader it takes a frame that stops early for the damage it is."""

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle = handle
        self._pending = memoryview(b"")
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._inside = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            compressed = (self._frame.unused_data if self._frame.eof else b"") or self._handle.read(1 << 17)
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
                self._inside = False
            if not compressed:
                if self._inside:
                    raise EOFError("the last Zstandard frame is not complete")
                return 0
            self._inside = True
            self._pending = memoryview(self._frame.decompress(compressed))
            self._inside = not self._frame.eof
        count = min(len(buffer), len(self._pending))
        buffer[:count], self._pending = self._pending[:count], self._pending[count:]
        return count

    def close(self) -> None:
        self._handle.close()
        super().close()


def _lines(handle: IO[bytes], span: Span) -> Iterator[tuple[int, bytes]]:
    """The (offset, line) pairs of the lines that begin in the span. A line across its start belongs to the span before."""
    offset = span.start
    if offset:
        handle.seek(offset - 1)
        offset += len(handle.readline()) - 1
    while (span.end is None or offset < span.end) and (line := handle.readline()):
        yield offset, line
        offset += len(line)


def _from_json(source: Source, offset: int, line: bytes, text_field: str) -> Document:
    """The document of one JSON line."""
    if offset == 0:
        line = line.removeprefix(BYTE_ORDER_MARK)
    content = _decoded(line)
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadDocumentError(f"is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise BadDocumentError(f"is a JSON {type(record).__name__}, not an object")
    if text_field not in record:
        raise BadDocumentError(f"has no field {text_field!r} (data.text_field), only {', '.join(map(repr, record)) or 'none'}")
    text = record.pop(text_field)
    if not isinstance(text, str):
        raise BadDocumentError(f"has {'null' if text is None else type(text).__name__} instead of text in field {text_field!r}")
    try:
        encoded = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadDocumentError(f"holds half of a surrogate pair at character {error.start}, which is no Unicode text") from error
    meta = {name: value for name, value in record.items() if len(json.dumps(value)) <= META_BYTES}
    return Document(source.name, offset, encoded, meta)


def _decoded(raw: bytes) -> str:
    """The text of UTF-8 bytes."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocumentError(f"is not UTF-8: byte {raw[error.start]:#04x} at position {error.start}, {error.reason}") from error


def _line_number(source: Source, offset: int) -> int:
    """The line, counted from 1, that begins at an offset. Counted only when it has to be named."""
    newlines = 0
    with _open(source) as handle:
        while offset > 0 and (block := handle.read(min(offset, 1 << 20))):
            newlines += block.count(b"\n")
            offset -= len(block)
    return newlines + 1
