"""Text shards: WebDataset tars of documents, plain USTAR.

A document is a sample of two members, `NUMBER.txt` with the text and `NUMBER.json` with what is known of it. Of short texts, many can share
one member: `NUMBER.jsonl` holds a line for each, with the text in the field `text`; a tar spends up to 2 kB on every sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

import orjson

from pipeline import artifact
from pipeline.artifact import Manifest
from pipeline.data import tar


def write(handle: IO[bytes], documents: Iterable[tuple[bytes, bytes]], per_member: int) -> None:
    """Write a shard.

    Args:
        documents: (text, metadata as a JSON object).
        per_member: documents that share a member.
    """
    if per_member == 1:
        for number, (text, meta) in enumerate(documents):
            handle.write(tar.member(f"{number:08d}.txt", text))
            handle.write(tar.member(f"{number:08d}.json", meta))
    else:
        rest = iter(documents)
        number = 0
        while some := list(islice(rest, per_member)):
            lines = [orjson.dumps({"text": text.decode("utf-8"), **orjson.loads(meta)}) + b"\n" for text, meta in some]
            handle.write(tar.member(f"{number:08d}.jsonl", b"".join(lines)))
            number += 1
    handle.write(tar.END)


def texts(shard: Path | IO[bytes]) -> Iterator[bytes]:
    """The UTF-8 text of every document of a shard (its path, or the open file), in its order."""
    for name, content in tar.members(shard):
        if name.endswith(".txt"):
            yield content
        elif name.endswith(".jsonl"):
            yield from (orjson.loads(line)["text"].encode("utf-8") for line in content.splitlines())


def documents(shard: Path | IO[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Every document of a shard: its text, and {"id", "corpus", "lang", "source", "meta"}."""
    text = b""
    for name, content in tar.members(shard):
        if name.endswith(".txt"):
            text = content
        elif name.endswith(".json"):
            yield text, orjson.loads(content)
        elif name.endswith(".jsonl"):
            for line in content.splitlines():
                about = orjson.loads(line)
                yield about.pop("text").encode("utf-8"), about


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
