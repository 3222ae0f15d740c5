"""JSON lines: one record per line, with the text in one field.

Lines with long strings are parsed in little memory: orjson takes 12 bytes for a byte of its input, whatever it contains.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import orjson

from pipeline.data.read import streams
from pipeline.data.read.documents import Bad, Document, ReadOptions
from pipeline.data.read.formats.checks import (
    BYTE_ORDER_MARK,
    META_BYTES,
    UnusableError,
    representable,
    small_fields,
    text_of,
    too_large,
    utf8,
)
from pipeline.data.read.input_files import InputFile, Span

LINE_BYTES = 1 << 20
"""Lines from this size on are parsed here."""

_LONG = 1 << 16
_PLACEHOLDER = "\x7flong string %d " + " " * META_BYTES  # as the string itself, too long for a small field
# A piece of a string that ends neither within an escape nor within a surrogate pair.
_PIECE = re.compile(rb'(?:[^"\\]{1,64}+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u[0-9a-fA-F]{4}|\\[^u]){1,128}+')
_COLON = re.compile(rb"\s*:")
_SKIPPED_BYTES = 1 << 20
Record = tuple[str, dict[str, Any]]


def loads(line: bytes, strings: dict[str, list[bytes]]) -> Any:
    """Parse a line as orjson.loads does, except that a placeholder is in place of every long string that is a value.

    Args:
        strings: receives the string of every placeholder, as `joined` takes it.

    Raises:
        orjson.JSONDecodeError: the line is not JSON.
    """
    try:
        record = _loads(line, strings)
    except (orjson.JSONDecodeError, _UnsuitedError):
        strings.clear()
        return orjson.loads(line)
    return record


class _UnsuitedError(Exception):
    """The line must be parsed as a whole."""


def _loads(line: bytes, strings: dict[str, list[bytes]]) -> Any:
    if b"\x7flong string " in line:  # the text of a placeholder
        raise _UnsuitedError
    skeleton, done, start = [], 0, line.find(b'"')
    while start >= 0:
        end = _end(line, start + 1)
        if end - start > _LONG:
            if _COLON.match(line, end + 1):  # the name of a field
                raise _UnsuitedError
            name = _PLACEHOLDER % len(strings)
            strings[name] = _unescaped(line, start + 1, end)
            skeleton += [line[done:start], orjson.dumps(name)]
            done = end + 1
        start = line.find(b'"', end + 1)
    return orjson.loads(b"".join([*skeleton, line[done:]]))


def _end(line: bytes, start: int) -> int:
    """The position of the quotation mark that ends the string whose content begins at `start`."""
    end = line.find(b'"', start)
    while end >= 0:
        first = end
        while line[first - 1] == ord("\\") and first > start:
            first -= 1
        if (end - first) % 2 == 0:
            return end
        end = line.find(b'"', end + 1)
    raise _UnsuitedError


def joined(pieces: list[bytes]) -> str:
    """The text of pieces in UTF-8, which are removed: Python decodes the whole in up to five times the memory of the text."""
    text = ""
    pieces.reverse()
    for _ in range(len(pieces)):
        text += pieces.pop().decode()  # in place
    return text


def _unescaped(line: bytes, start: int, end: int) -> list[bytes]:
    """The content line[start:end] of a string as pieces in UTF-8."""
    content = []
    while start < end:
        piece = _PIECE.match(line, start, end)
        if not piece:
            raise _UnsuitedError
        stop = piece.end()
        while stop < end and line[stop] & 0xC0 == 0x80:  # within a character
            stop += 1
        content.append(orjson.loads(b'"%b"' % line[start:stop]).encode())
        start = stop
    return content


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad]:
    """Yield the documents of the lines that begin in the span. A line that crosses its start belongs to the previous span."""
    with streams.open_bytes(span.file.path, span.section) as handle:
        yield from read_from(handle, span, options)


def read_from(handle: IO[bytes], span: Span, options: ReadOptions) -> Iterator[Document | Bad]:
    """Yield the documents as read(), of an open file."""
    start = handle.tell()
    if span.start:
        handle.seek(span.start - 1)
        start = span.start - 1 + skip_line(handle)
    # The line number is known only from the start of the file.
    where = (lambda offset, _: f"byte {offset}") if start else (lambda _, number: f"line {number}")
    yield from documents(span.file, records(handle, start, span.end, options), where)


def documents(
    source: InputFile, found: Iterable[tuple[int, int, Record | str]], position: Callable[[int, int], str], base: int = 0
) -> Iterator[Document | Bad]:
    """Yield the documents of (offset, number, record or the reason why it is unusable).

    Args:
        position: makes the position of an unusable record of its offset and its number.
        base: added to offsets.
    """
    for offset, number, record in found:
        if isinstance(record, str):
            yield Bad(source.label, position(offset, number), record)
        else:
            yield Document(source.name, base + offset, *record, source.corpus)


def records(handle: IO[bytes], offset: int, end: int | None, options: ReadOptions) -> Iterator[tuple[int, int, Record | str]]:
    """Yield (offset, line number, (text, small fields) or the reason why the line is unusable) for every line that is not blank.

    Args:
        handle: positioned at the beginning of a line.
        offset: that position, in bytes.
        end: lines that begin here or later are not read.
    """
    number, limit, field = 0, options.document_bytes, options.text_field
    while (end is None or offset < end) and (line := handle.readline(limit + 1)):
        number += 1
        begin, offset = offset, offset + len(line)
        try:
            if len(line) > limit:
                if not line.endswith(b"\n"):
                    offset += skip_line(handle)
                raise UnusableError(too_large(options))
            strings: dict[str, list[bytes]] = {}
            try:
                record = orjson.loads(line) if len(line) < LINE_BYTES else loads(line, strings)
            except orjson.JSONDecodeError:
                if line.isspace():
                    continue
                record = _parsed(line.removeprefix(BYTE_ORDER_MARK) if begin == 0 else line)
            line = b""  # perhaps large
            text = text_of(record, field)
            if text in strings:
                text = joined(strings[text])
            strings.clear()
            yield begin, number, (text, small_fields(record.items()))
        except UnusableError as error:
            yield begin, number, str(error)


def skip_line(handle: IO[bytes]) -> int:
    """Read to the end of a line of any length; return the number of bytes."""
    skipped = 0
    while part := handle.readline(_SKIPPED_BYTES):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _parsed(line: bytes) -> Any:
    """Parse a line that orjson rejects: NaN, which Python's json writes, is accepted and becomes null.

    Raises:
        UnusableError: the line is not JSON.
    """
    try:
        return representable(json.loads(utf8(line), parse_constant=lambda _: None))
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"is not JSON: {error}") from error
