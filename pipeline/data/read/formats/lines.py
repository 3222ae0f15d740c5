"""JSON lines: a record a line, its text in one field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO, Any

import orjson

from pipeline.data.read import streams
from pipeline.data.read.documents import Bad, Document, ReadOptions
from pipeline.data.read.formats.checks import BYTE_ORDER_MARK, UnusableError, small, text_of, too_large, utf8
from pipeline.data.read.sources import Span

_SKIPPED_BYTES = 1 << 20


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad]:
    """The documents of the lines that begin in the span. A line across its start belongs to the span before."""
    source = span.source
    with streams.open_bytes(source.path) as handle:
        start = 0
        if span.start:
            handle.seek(span.start - 1)
            start = span.start - 1 + _skip_line(handle)
        for offset, number, found in records(handle, start, span.end, options):
            if isinstance(found, str):
                # Lines are counted where that costs nothing.
                yield Bad(source.label, f"byte {offset}" if span.start else f"line {number}", found)
            else:
                text, meta = found
                yield Document(source.name, offset, text, meta, source.corpus)


Record = tuple[str, dict[str, Any]]


def records(handle: IO[bytes], offset: int, end: int | None, options: ReadOptions) -> Iterator[tuple[int, int, Record | str]]:
    """(offset, number of the line, (text, small fields) or the reason why there are none) of every line that is not blank.

    Args:
        handle: stands at the beginning of a line.
        offset: where that is.
        end: lines that begin here or later are left.
    """
    number, limit, field = 0, options.document_bytes, options.text_field
    while (end is None or offset < end) and (line := handle.readline(limit + 1)):
        number += 1
        begin, offset = offset, offset + len(line)
        try:
            if len(line) > limit:
                if not line.endswith(b"\n"):
                    offset += _skip_line(handle)
                raise UnusableError(too_large(options))
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                if line.isspace():
                    continue
                record = _parsed(line.removeprefix(BYTE_ORDER_MARK) if begin == 0 else line)
            text = text_of(record, field)
            yield begin, number, (text, small(record.items()))
        except UnusableError as error:
            yield begin, number, str(error)


def _skip_line(handle: IO[bytes]) -> int:
    """Read to the end of a line, however long it is; returns how many bytes that was."""
    skipped = 0
    while part := handle.readline(_SKIPPED_BYTES):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _parsed(line: bytes) -> Any:
    """What orjson refuses: with NaN in it, which Python writes and is taken as null here, it is a record all the same.

    Raises:
        UnusableError: it is none.
    """
    try:
        record = json.loads(utf8(line), parse_constant=lambda _: None)
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"is not JSON: {error}") from error
    try:
        orjson.dumps(record)
    except TypeError as error:
        raise UnusableError(f"holds what is no Unicode text, or nests too deep: {error}") from error
    return record
