"""Lines of JSON Lines files that hold one object each."""

from __future__ import annotations

import json
from typing import Any


class BadLine(ValueError):  # noqa: N818 - reported with its line, not raised to the user
    """A line that cannot be used; the message gives the reason."""


def parse(line: bytes) -> Any:
    """Return the content of a line.

    Raises:
        BadLine: it is not JSON.
    """
    try:
        return json.loads(line.decode())
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError are subclasses
        raise BadLine(f"is not JSON: {error}") from error
