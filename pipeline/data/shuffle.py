"""The one global shuffle, in two passes with bounded memory.

A document's place is a hash of its identity, so the result depends on the documents and the seed alone: not on the number of ranks, nor on
who read what when. Pass 1 spills every document to the bucket its hash falls into; in pass 2 each bucket is sorted and becomes one shard.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from pipeline.data.documents import Document
from pipeline.data.sources import Source

SPILL_BYTES = 64 << 20
"""Documents a rank collects in memory before it writes a run."""

_HASHES = 1 << 64
_RECORD = struct.Struct("<QII")  # sort key, bytes of metadata, bytes of text


@dataclass(frozen=True)
class Buckets:
    """How the hashes are cut into buckets: first those of the training split, then those of the validation split."""

    train: int
    validation: int
    seed: int
    validation_fraction: float

    @classmethod
    def plan(cls, sources: Sequence[Source], shard_megabytes: float, seed: int, validation_fraction: float) -> Buckets:
        """As many buckets as shards of the wanted size, going by the size of the input files."""
        text = sum(source.size * source.expansion for source in sources)
        shards = [round(text * part / (shard_megabytes * 1e6)) for part in (1 - validation_fraction, validation_fraction)]
        return cls(max(1, shards[0]), max(1, shards[1]), seed, validation_fraction)

    @property
    def count(self) -> int:
        """Buckets of both splits."""
        return self.train + self.validation

    def place(self, document: Document) -> tuple[int, int]:
        """(bucket, sort key) of a document."""
        identity = document.id.encode()
        key = xxhash.xxh3_64_intdigest(identity, seed=2 * self.seed)
        # A second, independent hash decides the split: a document stays where it is when the corpus around it grows.
        if xxhash.xxh3_64_intdigest(identity, seed=2 * self.seed + 1) < self.validation_fraction * _HASHES:
            return self.train + key * self.validation // _HASHES, key
        return key * self.train // _HASHES, key


class Spill:
    """One rank's documents on their way to their buckets: a file of runs, each ordered by bucket, and an index beside it.

    A file for every bucket would be simpler and, with thousands of buckets on hundreds of ranks, millions of files.
    """

    def __init__(self, path: Path, buckets: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._handle = open(path, "wb")  # noqa: SIM115 (close() is part of the story)
        self._pending: list[list[bytes]] = [[] for _ in range(buckets)]
        self._pending_bytes = 0
        self._runs: list[np.ndarray] = []
        self.documents = np.zeros(buckets, dtype=np.int64)

    def add(self, document: Document, bucket: int, key: int) -> None:
        """Send one document to its bucket."""
        described = {"id": document.id, "source": document.source, "meta": document.meta}
        meta = json.dumps(described, separators=(",", ":")).encode("ascii")
        text = document.text.encode()
        record = _RECORD.pack(key, len(meta), len(text)) + meta + text
        self._pending[bucket].append(record)
        self._pending_bytes += len(record)
        self.documents[bucket] += 1
        if self._pending_bytes >= SPILL_BYTES:
            self._write_run()

    def close(self) -> None:
        """Write what is still in memory, and the index: int64 (runs, buckets + 1), the byte at which each bucket of each run begins."""
        self._write_run()
        os.fsync(self._handle.fileno())
        self._handle.close()
        np.save(_index(self.path), np.stack(self._runs))

    def _write_run(self) -> None:
        start = self._handle.tell()
        sizes = [sum(map(len, records)) for records in self._pending]
        self._runs.append(start + np.cumsum([0, *sizes], dtype=np.int64))
        for records in self._pending:
            self._handle.writelines(records)
            records.clear()
        self._pending_bytes = 0


def _index(path: Path) -> Path:
    return path.with_suffix(".index.npy")


@dataclass(frozen=True)
class Shuffled:
    """A document as it goes into a shard: its place in the shuffle, its metadata as JSON (identity first), its text."""

    key: int
    meta: bytes
    text: bytes


def sorted_bucket(spills: Sequence[Path], bucket: int) -> list[Shuffled]:
    """All documents of one bucket, from every rank's spill, in their final order: by hash, equal hashes by identity."""
    documents: list[Shuffled] = []
    for path in spills:
        with open(path, "rb") as handle:
            for run in np.load(_index(path), mmap_mode="r"):
                start, end = int(run[bucket]), int(run[bucket + 1])
                handle.seek(start)
                documents.extend(_records(handle.read(end - start)))
    documents.sort(key=lambda document: (document.key, document.meta))
    return documents


def _records(raw: bytes) -> Iterator[Shuffled]:
    position = 0
    while position < len(raw):
        key, meta_bytes, text_bytes = _RECORD.unpack_from(raw, position)
        middle = position + _RECORD.size + meta_bytes
        position = middle + text_bytes
        yield Shuffled(key, raw[middle - meta_bytes : middle], raw[middle:position])


@dataclass(frozen=True)
class ShardPlan:
    """One shard: the documents first <= i < stop of a sorted bucket."""

    name: str
    bucket: int
    first: int
    stop: int


def plan_shards(buckets: Buckets, documents: Sequence[int]) -> list[ShardPlan]:
    """The shards that the filled buckets become, empty ones left out.

    A few documents may all fall into one split. Then the first of them moves over, so that there is always something to train on and, with
    two documents and a fraction above zero, something to validate on.

    Args:
        documents: documents in every bucket.
    """
    filled = [(bucket, 0, count) for bucket, count in enumerate(documents) if count]
    train = [part for part in filled if part[0] < buckets.train]
    validation = [part for part in filled if part[0] >= buckets.train]
    if not train and validation:
        train, validation = _first_document_moved(validation)
    elif not validation and buckets.validation_fraction > 0 and sum(documents) >= 2:
        validation, train = _first_document_moved(train)
    return [
        ShardPlan(f"{split}-{number:05d}.tar", *part)
        for split, parts in (("train", train), ("validation", validation))
        for number, part in enumerate(parts)
    ]


Parts = list[tuple[int, int, int]]


def _first_document_moved(parts: Parts) -> tuple[Parts, Parts]:
    """(the first document alone, all the others)."""
    (bucket, first, stop), *rest = parts
    return [(bucket, first, first + 1)], [part for part in [(bucket, first + 1, stop), *rest] if part[1] < part[2]]
