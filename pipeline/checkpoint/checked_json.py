"""Small JSON files with a checksum of their content, written atomically. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from pipeline.common.atomic_files import atomic_file


def write(path: Path, content: Mapping[str, Any], *, indent: int | None = 1) -> None:
    """Write a file with the entry "xxh3", the checksum of the other entries; it replaces an older file. Its folder exists.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps({**content, "xxh3": _checksum(content)}, indent=indent)
    with atomic_file(path, "w", parents=False) as handle:
        handle.write(text + "\n")


def read(path: Path) -> dict[str, Any]:
    """Read a file that `write` wrote, without the checksum. A file without a checksum is read as it is: old indexes have none.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON, or its content does not match its checksum.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise ValueError("it is no JSON object")
    if (checksum := content.pop("xxh3", None)) is not None and checksum != _checksum(content):
        raise ValueError("its content does not match its checksum")
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())
