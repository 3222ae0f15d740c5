"""Text shards: WebDataset tars of documents, `NUMBER.txt` with the text beside `NUMBER.json` with what is known of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from pipeline import artifact
from pipeline.artifact import Manifest
from pipeline.data import tar


def texts(shard: Path | IO[bytes]) -> Iterator[bytes]:
    """The UTF-8 text of every document of a shard (its path, or the open file), in its order."""
    return (content for name, content in tar.members(shard) if name.endswith(".txt"))


def documents(shard: Path | IO[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Every document of a shard: its text, and {"id", "corpus", "lang", "source", "meta"}."""
    text = b""
    for name, content in tar.members(shard):
        if name.endswith(".txt"):
            text = content
        elif name.endswith(".json"):
            yield text, json.loads(content)


def language(about: dict[str, Any]) -> str:
    """What a document counts as where languages are told apart: its language, or its corpus where that is not known."""
    return about.get("lang") or about.get("meta", {}).get("lang") or about.get("corpus") or "default"


def readable(folder: Path, text: Manifest, name: str) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The documents of a shard that need not be read to its end: its checksum is looked at only when they cannot be read.

    Raises:
        UserError: the shard is missing or corrupt.
    """
    try:
        yield from documents(folder / name)
    except (OSError, EOFError, ValueError):
        artifact.verify_files(folder, text, [name])
        raise
