"""Text shards: WebDataset tars of documents, plain USTAR.

A document is a sample of two members, `NUMBER.txt` with the text and `NUMBER.json` with the metadata. Short documents can share a member:
`NUMBER.jsonl` has one line per document, with the text in the field `text`; a tar takes up to 2 kB of overhead per sample.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import IO, Any

import orjson

from pipeline.common import artifact, languages
from pipeline.common.artifact import Manifest
from pipeline.common.condition import Condition
from pipeline.data import tar
from pipeline.data.read import documents as read

SPLITS = ("train", "validation")


def write(handle: IO[bytes], documents: Iterable[tuple[bytes, bytes]], per_member: int) -> None:
    """Write a shard of documents: (text, metadata as a JSON object)."""
    if per_member == 1:
        for number, (text, meta) in enumerate(documents):
            handle.write(tar.member(f"{number:08d}.txt", text))
            handle.write(tar.member(f"{number:08d}.json", meta))
    else:
        iterator = iter(documents)
        number = 0
        while group := list(islice(iterator, per_member)):
            lines = [orjson.dumps({"text": text.decode("utf-8"), **orjson.loads(meta)}) + b"\n" for text, meta in group]
            handle.write(tar.member(f"{number:08d}.jsonl", b"".join(lines)))
            number += 1
    handle.write(tar.END)


def documents(shard: Path | IO[bytes]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield every document of a shard (a path or an open file): its text, and {"id", "corpus", "lang", "source", "meta"}."""
    text = b""
    for name, content in tar.members(shard):
        if name.endswith(".txt"):
            text = content
        elif name.endswith(".json"):
            yield text, orjson.loads(content)
        elif name.endswith(".jsonl"):
            for line in content.splitlines():
                metadata = orjson.loads(line)
                yield metadata.pop("text").encode("utf-8"), metadata


class Selection:
    """Chooses documents by a condition on their fields (data.select); `text` is the manifest of the shards."""

    def __init__(self, condition: str, text: Manifest) -> None:
        self._condition, self._percentiles = Condition(condition), text.totals.get("scores", {})

    def __call__(self, record: Mapping[str, Any]) -> bool:
        """Whether a document is chosen."""
        return not self._condition.fault(self._fields(record))

    def missing(self, record: Mapping[str, Any]) -> list[str]:
        """Return the fields of the condition that a document does not have."""
        fields = self._fields(record)
        return [name for name in self._condition.names if name not in fields]

    def _fields(self, record: Mapping[str, Any]) -> dict[str, Any]:
        fields = read.fields(record)
        if (percentiles := self._percentiles.get(fields.get("lang") or "")) and "score" in fields:
            fields["score_rank"] = max(0, bisect_left(percentiles, fields["score"]) - 1) / 100
        return fields


def tokenized(
    documents: Iterable[tuple[bytes, dict[str, Any]]], settings: Mapping[str, Any], text: Manifest
) -> Iterable[tuple[bytes, dict[str, Any]]]:
    """Return those of the documents of a shard that token shards have.

    Args:
        settings: of the token shards, with data.select.
        text: manifest of the text shards.
    """
    chosen = Selection(select, text) if (select := settings.get("data.select")) else None
    return documents if chosen is None else ((content, record) for content, record in documents if chosen(record))


def language(metadata: dict[str, Any]) -> str:
    """The language label of a document for statistics: its language, or its corpus if the language is unknown."""
    given = (metadata.get("lang"), (metadata.get("meta") or {}).get("lang"))
    labels = (languages.normalized(code) for code in given if code and isinstance(code, str))
    known = next((label for label in labels if label != languages.UNKNOWN), None)
    return known or metadata.get("corpus") or "default"


def verified(folder: Path, text: Manifest, name: str) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the documents of a shard; its checksum is verified after the last one.

    Raises:
        UserError: the shard is missing or corrupt.
    """
    with artifact.open_verified(folder, text, name) as shard:
        yield from documents(shard)


def readable(folder: Path, text: Manifest, name: str) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the documents of a shard that may be read partially: the checksum is verified only if reading fails.

    Raises:
        UserError: the shard is missing or corrupt.
    """
    try:
        yield from documents(folder / name)
    except (OSError, EOFError, ValueError):
        artifact.verify_files(folder, text, [name])
        raise


def totals(files: dict[str, dict[str, Any]], counted: tuple[str, ...]) -> dict[str, Any]:
    """Sum fields, of which text_bytes becomes bytes, of the shards of every split, and of every split of every corpus."""

    def sums(split: str, corpus: str | None) -> dict[str, int]:
        chosen = [e for e in files.values() if e.get("split") == split and corpus in (None, e["corpus"])]
        return {"shards": len(chosen), **{field.removeprefix("text_"): sum(entry[field] for entry in chosen) for field in counted}}

    corpora = sorted({entry["corpus"] for entry in files.values() if "split" in entry})
    by_corpus = {corpus: {split: sums(split, corpus) for split in SPLITS} for corpus in corpora}
    return {**{split: sums(split, None) for split in SPLITS}, "corpora": by_corpus}
