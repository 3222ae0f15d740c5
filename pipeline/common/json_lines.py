"""Lines of JSON Lines files that hold one object each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn


class BadLine(ValueError):  # noqa: N818 - reported with its line, not raised to the user
    """A line that cannot be used; the message gives the reason."""


def parse(line: bytes) -> Any:
    """Return the content of a line. A byte order mark at its begin is ignored.

    Raises:
        BadLine: it is not JSON, or a text has half of a surrogate pair, which no file and no tokenizer can represent.
    """
    try:
        content = json.loads(line.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are subclasses
        raise BadLine(f"is not JSON: {error}") from error
    except RecursionError:
        raise BadLine("is not usable JSON: its objects are nested too deeply") from None
    if b"\\u" in line:  # valid UTF-8 contains surrogates as escapes only
        for text in _texts(content):
            if surrogate := next((character for character in text if "\ud800" <= character <= "\udfff"), None):
                raise BadLine(f"has the character \\u{ord(surrogate):04x}, half of a surrogate pair")
    return content


def dump(content: Any) -> str:
    """Return a line without its end, which UTF-8 can represent: as text, or with escapes if it has half of a surrogate pair."""
    text = json.dumps(content, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(content)
    return text


def _refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and infinities, which Python's parser accepts."""
    raise ValueError(f"{name} is not a JSON number")


def _texts(content: Any) -> Iterator[str]:
    """Yield the keys and texts of parsed JSON."""
    stack = [content]
    while stack:
        match stack.pop():
            case str() as text:
                yield text
            case list() as items:
                stack += items
            case dict() as fields:
                stack += [*fields, *fields.values()]
