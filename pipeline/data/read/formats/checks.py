"""Checks of texts and metadata fields that all formats share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import orjson

from pipeline.data.read import streams
from pipeline.data.read.documents import Bad, Document, ReadOptions
from pipeline.data.read.input_files import InputFile, Span

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

META_BYTES = 1024
"""Largest metadata field that is kept with a document: strings in characters, lists and objects in bytes of JSON."""


_FIELD = re.compile(r"[^\W\d][\w.-]{0,39}")
_FIELDS = 8
"""Fields of a record that a reason names, if they look like names: a field may also be an e-mail address or a whole text."""


class UnusableError(Exception):
    """The reason why a record is not a document; the reader of its format adds the position.

    It is logged and written to reports: it contains nothing of the text.
    """


def field_names(names: Iterable[str]) -> str:
    """The fields of a record for a reason: the first ones that look like names, and the number of the others."""
    given = list(names)
    shown = [name for name in given if _FIELD.fullmatch(name)][:_FIELDS]
    more = [f"{len(given) - len(shown):,} further"] if len(given) > len(shown) else []
    return ", ".join([*map(repr, shown), *more]) or "none"


def no_column(field: str, names: Sequence[str]) -> str:
    """The reason for a table without texts."""
    return f"has no column {field!r} (data.text_field), only {field_names(names)}"


def utf8(raw: bytes) -> str:
    """Decode UTF-8 bytes.

    Raises:
        UnusableError: they are not valid UTF-8.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnusableError(f"is not UTF-8: byte {raw[error.start]:#04x} at position {error.start}, {error.reason}") from error


def text_of(record: Any, field: str) -> str:
    """Remove the text from a record and return it.

    Raises:
        UnusableError: the record has no text.
    """
    if not isinstance(record, dict):
        raise UnusableError(f"is a JSON {type(record).__name__}, not an object")
    if field not in record:
        raise UnusableError(f"has no field {field!r} (data.text_field), only {field_names(record)}")
    text = record.pop(field)
    if not isinstance(text, str):
        raise UnusableError(f"has {'null' if text is None else type(text).__name__} instead of text in field {field!r}")
    return text


def small_fields(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The fields of at most META_BYTES as plain JSON; other Parquet types (dates, decimals) are converted to strings."""
    small: dict[str, Any] = {}
    for name, value in fields:
        if isinstance(value, str):
            if len(value) <= META_BYTES:
                small[name] = value
        elif value is None or isinstance(value, int):
            small[name] = value
        else:
            try:
                encoded = orjson.dumps(value, default=str)
            except TypeError:  # nested deeper than orjson supports
                continue
            if len(encoded) <= META_BYTES:
                small[name] = orjson.loads(encoded)  # orjson has converted NaN to null
    return small


def check_size(size: int, options: ReadOptions, what: str = "") -> None:
    """Refuse `what` of a document, or the document, that has more bytes than data.document_megabytes.

    Raises:
        UnusableError: it has.
    """
    if size > options.document_bytes:
        raise UnusableError(f"{what}is larger than data.document_megabytes={options.document_bytes / 1e6:g}")


def representable(record: Any) -> Any:
    """Return a record of JSON.

    Raises:
        UnusableError: UTF-8 cannot represent it.
    """
    try:
        orjson.dumps(record)
    except TypeError as error:
        raise UnusableError(f"contains invalid Unicode, or is nested too deeply: {error}") from error
    return record


def document_of_file(span: Span, options: ReadOptions, parse: Callable[[bytes], tuple[str, dict[str, str]]]) -> Iterator[Document | Bad]:
    """Yield the document of a file that is a single one; `parse` returns text and metadata, or raises UnusableError."""
    source = span.file
    with streams.open_bytes(source.path, span.section) as handle:
        raw = handle.read(options.document_bytes + 1)
    try:
        check_size(len(raw), options)
        text, fields = parse(raw)
        yield Document(source.name, 0, text, small_fields(fields.items()), source.corpus)
    except UnusableError as error:
        yield Bad(source.label, "", str(error))


def document_of(record: Any, source: InputFile, number: int, unit: str, options: ReadOptions, *, check: bool = True) -> Document | Bad:
    """The document of a numbered record.

    Args:
        unit: what is numbered.
        check: whether it may have texts that UTF-8 cannot represent.
    """
    try:
        text = text_of(representable(record) if check else record, options.text_field)
        check_size(len(text) if len(text) * 4 <= options.document_bytes else len(text.encode()), options)
        return Document(source.name, number, text, small_fields(record.items()), source.corpus)
    except UnusableError as error:
        return Bad(source.label, f"{unit} {number}", str(error))
