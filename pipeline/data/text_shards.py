"""Text shards: WebDataset tars of documents, `NUMBER.txt` with the text beside `NUMBER.json` with what is known of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

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
