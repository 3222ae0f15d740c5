"""JSON lines: one record per line, with the text in one field."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import orjson

from pipeline.data.read import streams
from pipeline.data.read.documents import Bad, Document, ReadOptions
from pipeline.data.read.formats.checks import BYTE_ORDER_MARK, UnusableError, check_size, representable, small_fields, text_of, utf8
from pipeline.data.read.input_files import InputFile, Span

_SKIPPED_BYTES = 1 << 20
Record = tuple[str, dict[str, Any]]


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
    source: InputFile, parsed: Iterable[tuple[int, int, Record | str]], position: Callable[[int, int], str], base: int = 0
) -> Iterator[Document | Bad]:
    """Yield the documents of (offset, number, record or the reason why it is unusable).

    Args:
        position: makes the position of an unusable record of its offset and its number.
        base: added to offsets.
    """
    for offset, number, record in parsed:
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
            if len(line) > limit and not line.endswith(b"\n"):
                offset += skip_line(handle)
            check_size(len(line), options)
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                if line.isspace():
                    continue
                record = _parsed(line.removeprefix(BYTE_ORDER_MARK) if begin == 0 else line)
            line = b""  # perhaps large
            text = text_of(record, field)
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
