"""dropped.jsonl.zst: every document that cleaning or deduplication dropped, with the step and the reason (data.save_dropped).

Parts and shards write files of their own, which are concatenated at the end: Zstandard frames may follow each other. The result has the
format of an input file, so that the documents can be sharded again with other settings.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import zstandard

from pipeline.common.atomic_files import atomic_file
from pipeline.common.mpi import Comm, exchange
from pipeline.data.dedup.clusters import ORIGIN, Clusters, Kind
from pipeline.data.shard.spilled_documents import Pool

NAME = "dropped.jsonl.zst"

BY_CLEANING, BY_DEDUPLICATION, BY_PARAGRAPHS = ".dropped.zst", ".duplicates.zst", ".repeated.zst"
"""Suffixes of the files of the parts, and of the shards."""

Add = Callable[[dict[str, Any], str, str, str], None]
"""Adds a document: its metadata record, the step that dropped it, the reason, and its text before that step."""


@contextmanager
def writer(path: Path) -> Iterator[Add]:
    """Write a file of dropped documents atomically."""
    with atomic_file(path) as handle, zstandard.ZstdCompressor().stream_writer(handle, closefd=False) as compressed:

        def add(metadata: dict[str, Any], step: str, reason: str, text: str) -> None:
            record = {"id": metadata["id"], "step": step, "reason": reason, **metadata, "text": text}
            compressed.write(orjson.dumps(record, default=str, option=orjson.OPT_APPEND_NEWLINE))

        yield add


def write_duplicates(comm: Comm, pool: Pool, found: Clusters) -> None:
    """Write the duplicates of every part next to its spill. Collective.

    Args:
        found: with `origin` on rank 0.
    """
    rows = np.empty(len(found.origin), dtype=[("number", "<i8"), *ORIGIN.descr])
    if len(rows):
        rows["number"], rows["kept"], rows["kind"] = found.drop, found.origin["kept"], found.origin["kind"]
    rows = np.sort(exchange(comm, rows, pool.parts_of(rows["number"]) % comm.size), order="number")
    parts = pool.parts_of(rows["number"])
    for part in range(comm.rank, len(pool.stems), comm.size):
        with writer(pool.stems[part].with_suffix(BY_DEDUPLICATION)) as add:
            for number, kept, kind in rows[parts == part].tolist():
                (meta, text), reason = pool.record(number), Kind(kind).reason
                original = orjson.loads(pool.record(kept)[0])["id"] if kept >= 0 else "a document of dedup.against"
                add(orjson.loads(meta), "dedup", f"{reason} of {original}", text.decode("utf-8"))


def join(path: Path, parts: Iterable[Path]) -> None:
    """Concatenate the files that exist."""
    with atomic_file(path) as handle:
        for part in parts:
            if part.exists():
                with open(part, "rb") as content:
                    shutil.copyfileobj(content, handle, 1 << 22)
