"""dropped.jsonl.zst: every document that cleaning or deduplication dropped, with the step and the reason (data.save_dropped).

Parts and shards write files of their own, which are concatenated at the end: Zstandard frames may follow each other. The result has the
format of an input file, so that the documents can be sharded again with other settings.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import zstandard

from pipeline.common.atomic_files import atomic_file
from pipeline.common.mpi import Comm
from pipeline.data.dedup.clusters import ORIGIN, ClusterKind, Clusters
from pipeline.data.dedup.distributed import fetch
from pipeline.data.shard.spilled_documents import SpillPool

NAME = "dropped.jsonl.zst"

BY_CLEANING, BY_DEDUPLICATION, BY_PARAGRAPHS = ".dropped.zst", ".duplicates.zst", ".repeated.zst"
"""Suffixes of the files of the parts, and of the shards."""

_PIECE, _END = 1 << 18, b'"}'

Add = Callable[[dict[str, Any], str, str, str], None]
"""Adds a document: its metadata record, the step that dropped it, the reason, and its text before that step."""


@contextmanager
def writer(path: Path) -> Iterator[Add]:
    """Write a file of dropped documents atomically."""
    with atomic_file(path) as handle, zstandard.ZstdCompressor().stream_writer(handle, closefd=False) as compressed:

        def add(metadata: dict[str, Any], step: str, reason: str, text: str) -> None:
            record = {"id": metadata["id"], "step": step, "reason": reason, **metadata, "text": ""}
            compressed.write(orjson.dumps(record, default=str).removesuffix(_END))
            for start in range(0, len(text), _PIECE):  # orjson takes up to eight times the memory of a string
                compressed.write(orjson.dumps(text[start : start + _PIECE])[1:-1])
            compressed.write(_END + b"\n")

        yield add


def write_duplicates(comm: Comm, pool: SpillPool, duplicated: Clusters) -> None:
    """Write the duplicates of every part of this rank next to its spill, with the identity of the document that is kept. Collective."""
    kept = np.unique(duplicated.origin["kept"])
    kept = kept[kept >= 0]

    def identity(numbers: Sequence[int]) -> list[str]:
        return [str(orjson.loads(pool.record(number)[0])["id"]) for number in numbers]

    identities = fetch(comm, kept, pool.holders_of(kept), identity)
    originals = dict(zip(kept.tolist(), identities, strict=True))
    parts = pool.parts_of(duplicated.drop)
    for part in pool.mine:
        with writer(pool.stem(part).with_suffix(BY_DEDUPLICATION)) as add:
            mine = parts == part
            for number, (kept_number, kind) in zip(duplicated.drop[mine].tolist(), duplicated.origin[mine].tolist(), strict=True):
                (meta, text), reason = pool.record(number), ClusterKind(kind).reason
                original = originals[kept_number] if kept_number >= 0 else "a document of dedup.against"
                add(orjson.loads(meta), "dedup", f"{reason} of {original}", text.decode("utf-8"))


def join(path: Path, parts: Iterable[Path]) -> None:
    """Concatenate the files that exist."""
    with atomic_file(path) as handle:
        for part in parts:
            if part.exists():
                with open(part, "rb") as content:
                    shutil.copyfileobj(content, handle, 1 << 22)


SUFFIX = ".drop"
_ROW = np.dtype([("number", "<i8"), *ORIGIN.descr])


def save(pool: SpillPool, suffix: str, duplicated: Clusters) -> None:
    """Save the drops of the parts of this rank in files with a suffix; a part without any has no file."""
    rows = np.empty(len(duplicated.drop), dtype=_ROW)
    rows["number"], rows["kept"], rows["kind"] = duplicated.drop, duplicated.origin["kept"], duplicated.origin["kind"]
    bounds = np.searchsorted(duplicated.drop, pool.starts)
    for part in pool.mine:
        if bounds[part] < bounds[part + 1]:
            with atomic_file(pool.stem(part).with_suffix(suffix)) as handle:
                handle.write(rows[bounds[part] : bounds[part + 1]].tobytes())


def load(pool: SpillPool, suffix: str) -> tuple[np.ndarray, np.ndarray]:
    """The drops of the parts of this rank: `drop` and `origin` of Clusters."""
    paths = [pool.stem(part).with_suffix(suffix) for part in pool.mine]
    rows = np.concatenate([np.empty(0, _ROW), *(np.fromfile(path, dtype=_ROW) for path in paths if path.exists())])
    origin = np.empty(len(rows), dtype=ORIGIN)
    origin["kept"], origin["kind"] = rows["kept"], rows["kind"]
    return rows["number"].copy(), origin
