"""Token shards as Parquet files with one row per document, and the conversion of token shards part by part, shared by the ranks.

An interrupted conversion continues with the missing parts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.common import artifact
from pipeline.common.artifact import Manifest
from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import UserError
from pipeline.common.mpi import Comm
from pipeline.common.progress import Progress
from pipeline.common.unfinished import work
from pipeline.data.shard import text_shards
from pipeline.data.tokenize import token_shards

log = logging.getLogger("pipeline")

Files = dict[str, dict[str, Any]]
"""File name -> manifest entry."""
GROUP_TOKENS = 1 << 22
"""Approximate number of tokens per row group; a document is not split over row groups."""
Shards = tuple[Path, Manifest]
"""The folder of shards, and its manifest."""


def convert_parts(
    comm: Comm,
    folder: Path,
    key_and_stage: tuple[str, str],
    settings: dict[str, Any],
    sizes: dict[str, int],
    convert: Callable[[str], Files],
    totals: Callable[[Files], dict[str, Any]],
    resume: dict[str, Any] | None = None,
) -> None:
    """Convert the missing parts, distributed over the ranks, and write the manifest.

    Args:
        key_and_stage: the configuration key of the folder, and the stage recorded in its manifest.
        sizes: part -> size, for load balancing.
        convert: writes a part and returns the manifest entries of its files.
        resume: further settings that must not change until the conversion is finished.
    """
    outputs = ["*-?????.tar", "*.parquet", "*.bin", "*.idx"]
    with work(comm, folder, key_and_stage, settings, lambda _: "converted", outputs, resume=resume) as unfinished:
        if not unfinished:
            return
        mine = [part for part in token_shards.share(sizes, comm.rank, comm.size) if unfinished.note(part) is None]
        with Progress(len(mine), "convert_tokens", "parts", comm.rank) as progress:
            for part in mine:
                unfinished.write(part, convert(part))
                progress.advance(1, part)
        comm.barrier()
        if comm.rank == 0:
            files = {name: entry for part in sizes for name, entry in unfinished.note(part).items()}
            artifact.write(folder, Manifest(key_and_stage[1], settings, files, totals(files)))
            unfinished.clear()
            log.info("convert_tokens: wrote %s (%s files)", folder, len(files))


def write(folder: Path, manifest: artifact.Manifest, name: str, path: Path, text: Shards | None) -> dict[str, dict[str, Any]]:
    """Write one token shard as a Parquet file with the columns tokens (end-of-document token included), length, corpus and id.

    Args:
        text: the text shards of the same names, which hold the ids of the documents; None leaves the column id empty.

    Returns:
        File name -> its manifest entry.
    """
    entry = manifest.files[name]
    ids, ends = token_shards.ids(folder / name, entry), token_shards.ends(folder / name, entry)
    starts = np.concatenate([[0], ends])
    documents = [] if text is None else text_shards.tokenized(text_shards.verified(*text, name), manifest.settings, text[1])
    names = [None] * len(ends) if text is None else [record["id"] for _, record in documents]
    assert len(names) == len(ends), f"{name} has {len(ends)} documents, and the text shard {len(names)}"
    corpus_type = pa.dictionary(pa.int32(), pa.string())
    schema = pa.schema(
        [("tokens", pa.list_(pa.from_numpy_dtype(ids.dtype))), ("length", pa.uint32()), ("corpus", corpus_type), ("id", pa.string())],
        metadata={key: str(manifest.totals[key]) for key in ("vocab_size", "end_of_document", "tokenizer")},
    )
    with atomic_file(path) as handle, pq.ParquetWriter(handle, schema, compression="zstd") as writer:
        first = 0
        while first < len(ends):
            stop = max(first + 1, int(np.searchsorted(starts, starts[first] + GROUP_TOKENS, side="right")) - 1)
            offsets = starts[first : stop + 1]
            column = pa.ListArray.from_arrays(pa.array((offsets - offsets[0]).astype(np.int32)), pa.array(ids[offsets[0] : offsets[-1]]))
            corpus = pa.DictionaryArray.from_arrays(np.zeros(stop - first, np.int32), [entry["corpus"]])
            columns = [column, np.diff(offsets).astype(np.uint32), corpus, pa.array(names[first:stop], pa.string())]
            writer.write_table(pa.table(columns, schema=schema))
            first = stop
    return {path.name: artifact.entry(path, documents=entry["documents"], tokens=entry["tokens"])}


def text_shards_of(folder: Path, tokens_manifest: Manifest) -> Shards | None:
    """The text shards that the token shards were made from, with the ids of the documents; None with a warning if data.shards differs."""
    try:
        text = artifact.read(folder, key="data.shards", stage="shard")
    except UserError:
        reason = "is not a complete folder of text shards"
    else:
        if artifact.fingerprint(text) == tokens_manifest.settings.get("data.shards"):
            return folder, text
        reason = "is not the folder from which the token shards were made"
    log.warning("convert_tokens: the column id of the Parquet files is empty, because data.shards=%s %s", folder, reason)
    return None
