"""Parses a line of JSON with long strings in little memory: orjson takes 12 bytes for a byte of its input, whatever it contains."""

from __future__ import annotations

import re
from typing import Any

import orjson

from pipeline.data.read.formats.checks import META_BYTES

LINE_BYTES = 1 << 20
"""Lines from this size on are parsed here."""

_LONG = 1 << 16
_PLACEHOLDER = "\x7flong string %d " + " " * META_BYTES  # as the string itself, too long for a small field
# A piece of a string that ends neither within an escape nor within a surrogate pair.
_PIECE = re.compile(rb'(?:[^"\\]{1,64}+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|\\u[0-9a-fA-F]{4}|\\[^u]){1,128}+')
_COLON = re.compile(rb"\s*:")


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
