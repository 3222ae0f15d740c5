"""JSON: an array of records, one record over several lines, or JSON lines under another name."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import IO

from pipeline.data.read import streams
from pipeline.data.read.documents import Bad, Document, ReadOptions
from pipeline.data.read.formats import lines
from pipeline.data.read.formats.checks import document_of
from pipeline.data.read.input_files import Span

_BETWEEN = re.compile(r"[\s,]*")
_LINES, _ARRAY, _RECORD = range(3)


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad]:
    """Yield the documents of the records; those of an array in the first span of the file."""
    with streams.open_bytes(span.file.path, span.section) as handle:
        first = handle.peek(1).removeprefix(codecs.BOM_UTF8).lstrip()  # type: ignore[attr-defined]
        kind = _ARRAY if first.startswith(b"[") else _RECORD if first.partition(b"\n")[0].strip() == b"{" else _LINES
        if kind == _LINES:
            yield from lines.read_from(handle, span, options)
        elif not span.start:
            yield from _records(span, handle, kind, options)


def _records(span: Span, handle: IO[bytes], kind: int, options: ReadOptions) -> Iterator[Document | Bad]:
    """Yield the documents of the values.

    Raises:
        DamageError: the records cannot be told apart from here on.
    """
    decode, parse = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape").decode, json.JSONDecoder(parse_constant=lambda _: None)
    text, number, ended = decode(handle.read(streams.BUFFER_BYTES)), 0, False
    place = text.index("[") + 1 if kind == _ARRAY else 0
    while kind == _ARRAY or not number:
        place = _BETWEEN.match(text, place).end()  # type: ignore[union-attr]
        if text[place : place + 1] == "]":
            return
        try:
            value, place = parse.raw_decode(text, place)
        except (json.JSONDecodeError, RecursionError) as error:  # perhaps the record goes on
            if ended or len(text) - place > options.document_bytes:
                rest = len(text[place:].encode("utf-8", "surrogateescape"))
                raise streams.DamageError(handle.tell() - rest, f"record {number} is not JSON, or too large: {error}") from error
            more = handle.read(max(streams.BUFFER_BYTES, len(text) - place))
            text, place, ended = text[place:] + decode(more, final=not more), 0, not more
        else:
            yield document_of(value, span.file, number, "record", options)
            number += 1
