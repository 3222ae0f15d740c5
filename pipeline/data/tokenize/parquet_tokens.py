"""Token shards as Parquet files with one row per document."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.common import artifact
from pipeline.common.artifact import Manifest
from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import UserError
from pipeline.data.shard import text_shards
from pipeline.data.tokenize import token_shards

log = logging.getLogger("pipeline")

GROUP_TOKENS = 1 << 22
"""Approximate number of tokens per row group; a document is not split over row groups."""


Shards = tuple[Path, Manifest]
"""The folder of shards, and its manifest."""


def write(folder: Path, manifest: artifact.Manifest, name: str, path: Path, text: Shards | None) -> dict[str, dict[str, Any]]:
    """Write one token shard as a Parquet file with the columns tokens (end-of-document token included), length, corpus and id.

    Args:
        folder: of the token shards.
        manifest: of the folder.
        name: of the shard.
        path: the file to write.
        text: the text shards of the same names, which hold the ids of the documents; None leaves the column id empty.

    Returns:
        File name -> its manifest entry.
    """
    entry = manifest.files[name]
    ids, ends = token_shards.ids(folder / name, entry), np.cumsum(token_shards.lengths(folder / name, entry), dtype=np.int64)
    starts = np.concatenate([[0], ends])
    names = [None] * len(ends) if text is None else [metadata["id"] for _, metadata in text_shards.verified(*text, name)]
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
