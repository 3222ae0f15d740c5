"""What every form asks of a text and of the fields beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from pipeline.data.read.documents import ReadOptions

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

META_BYTES = 1024
"""Further fields of a record travel with its document when they are no longer than this: texts in characters, lists and objects as JSON."""


class UnusableError(Exception):
    """Why a record cannot become a document; the reader of its form adds where it stands."""


def utf8(raw: bytes) -> str:
    """The text of UTF-8 bytes.

    Raises:
        UnusableError: they are none.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnusableError(f"is not UTF-8: byte {raw[error.start]:#04x} at position {error.start}, {error.reason}") from error


def text_of(record: Any, field: str) -> str:
    """Take the text out of a record.

    Raises:
        UnusableError: it holds none.
    """
    if not isinstance(record, dict):
        raise UnusableError(f"is a JSON {type(record).__name__}, not an object")
    if field not in record:
        raise UnusableError(f"has no field {field!r} (data.text_field), only {', '.join(map(repr, record)) or 'none'}")
    text = record.pop(field)
    if not isinstance(text, str):
        raise UnusableError(f"has {'null' if text is None else type(text).__name__} instead of text in field {field!r}")
    return text


def small(fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The fields that are small enough to travel along, as plain JSON: what else Parquet knows (dates, decimals) becomes text."""
    kept: dict[str, Any] = {}
    for name, value in fields:
        if isinstance(value, str):
            if len(value) <= META_BYTES:
                kept[name] = value
        elif value is None or isinstance(value, int):
            kept[name] = value
        else:
            try:
                encoded = orjson.dumps(value, default=str)
            except TypeError:  # nests deeper than orjson writes
                continue
            if len(encoded) <= META_BYTES:
                kept[name] = orjson.loads(encoded)  # NaN is null by now
    return kept


def too_large(options: ReadOptions) -> str:
    """The reason of a document over the limit."""
    return f"is larger than data.document_megabytes={options.document_bytes / 1e6:g}"


def fitting(text: str, options: ReadOptions) -> str:
    """The text itself.

    Raises:
        UnusableError: it is larger than a document may be.
    """
    if len(text) * 4 > options.document_bytes and len(text.encode()) > options.document_bytes:
        raise UnusableError(too_large(options))
    return text
