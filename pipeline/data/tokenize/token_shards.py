"""Token shards: WebDataset tar files whose tokens are one uncompressed numpy array, so that they can be read by file offset.

A shard contains one sample of three members: `.tokens.npy` (uint16 or uint32, tokens) is the concatenation of the documents, each followed
by the end-of-document token, and preceded by a token if tokenizer.bos says so; `.lengths.npy` (uint32, documents) is the number of tokens
of every document; `.json` contains the metadata.
The tokens are the first member and are written as they are produced, so that memory does not grow with the shard. The headers before them
have a fixed size and are written at the end, when the number of tokens is known.

Shards of fine-tuning (data/load/example_shards.py) have two members more.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from pipeline.common import artifact
from pipeline.common.atomic_files import atomic_file
from pipeline.common.mpi import balanced
from pipeline.common.remote import RemotePath
from pipeline.common.texts import in_batches
from pipeline.data import tar
from pipeline.data.shard import text_shards
from pipeline.data.tokenize.encoders import EXCERPT, BatchEncoder
from pipeline.data.tokenize.tokenizer import TextEncoder

BATCH_BYTES = 1 << 20
"""Bytes of text per call of the tokenizer; the ids of this much text fit into the cache of a core."""

_HEADERS = tar.BLOCK + 128
"""Bytes before the first token: the tar header, and the 128-byte .npy header of a one-dimensional array of any length."""

EXCERPT_SHARDS, EXCERPTS = 8, 4
"""Maximum number of text shards that excerpts are taken from, and of documents per shard."""


def share(sizes: dict[str, int], rank: int, ranks: int) -> list[str]:
    """The sorted names of the shards of one rank."""
    names = sorted(sizes)
    return [names[number] for number in sorted(balanced([sizes[name] for name in names], rank, ranks))]


class ShardWriter:
    """Writes one token shard of "<u2" or "<u4": add() appends documents, close() completes the file."""

    def __init__(self, handle: IO[bytes], stem: str, dtype: np.dtype) -> None:
        self._handle, self._stem, self._dtype = handle, stem, dtype
        self._lengths = [np.empty(0, "<u4")]
        self._tokens = 0
        handle.seek(_HEADERS)

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents.

        Args:
            tokens: (tokens,) the concatenated documents with their end-of-document tokens.
            lengths: (documents,) tokens of each document.
        """
        self._handle.write(tokens.astype(self._dtype, copy=False).data)
        self._lengths.append(lengths.astype("<u4"))
        self._tokens += len(tokens)

    def close(self, arrays: Mapping[str, np.ndarray] | None = None, /, **about: Any) -> dict[str, Any]:
        """Write the headers, the lengths, further arrays and the metadata.

        Args:
            arrays: name of a further member -> (n,) its content.
            about: additional metadata for the shard's `.json`.

        Returns:
            The fields of the manifest entry that locate the arrays: dtype, tokens, documents, and the byte offsets of the first two arrays;
            of each further one its length, under its name, and NAME_offset.
        """
        lengths, handle = np.concatenate(self._lengths), self._handle
        content = _HEADERS - tar.BLOCK + self._tokens * self._dtype.itemsize
        counts = {"dtype": self._dtype.name, "tokens": self._tokens, "documents": len(lengths)}
        handle.write(tar.padding(content))
        after = handle.tell()
        handle.write(tar.member(f"{self._stem}.lengths.npy", _npy_header(lengths.dtype, len(lengths)) + lengths.tobytes()))
        places = {}
        for name, values in (arrays or {}).items():
            counts[name], places[f"{name}_offset"] = len(values), handle.tell() + _HEADERS
            handle.write(tar.member(f"{self._stem}.{name}.npy", _npy_header(values.dtype, len(values)) + values.tobytes()))
        handle.write(tar.member(f"{self._stem}.json", json.dumps({**counts, **about}).encode()))
        handle.write(tar.END)
        handle.seek(0)
        handle.write(tar.header(f"{self._stem}.tokens.npy", content) + _npy_header(self._dtype, self._tokens))
        return {**counts, "offset": _HEADERS, "lengths_offset": after + _HEADERS, **places}


def write(
    shards: Path,
    text: artifact.Manifest,
    name: str,
    path: Path | RemotePath,
    encoder: TextEncoder,
    engine: BatchEncoder,
    progress: Callable[[int], None],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Tokenize one text shard. The shard is read once; its checksum is verified during the read.

    Args:
        path: the token shard to write.
        progress: called with the number of bytes of text after each batch.
        settings: of the token shards; data.select chooses the documents.

    Returns:
        The manifest entry: size, checksum, dtype, counts, and the byte offsets of the first token and of the first length.

    Raises:
        UserError: the text shard is missing or corrupt; nothing is written.
    """
    source, text_bytes = text.files[name], 0
    with atomic_file(path) as handle:
        writer = ShardWriter(handle, path.name.removesuffix(".tar"), encoder.dtype)
        with artifact.open_verified(shards, text, name) as shard:
            documents = text_shards.tokenized(text_shards.documents(shard), settings, text)
            for batch in in_batches((content for content, _ in documents), BATCH_BYTES):
                ids, lengths = engine.encode([document.decode("utf-8") for document in batch])
                writer.add(*_closed(ids.astype(encoder.dtype), lengths, encoder))
                done = sum(map(len, batch))
                text_bytes += done
                progress(done)
        about = {"text_bytes": text_bytes, "split": source["split"], "corpus": source["corpus"]}
        counts = writer.close(**about, **encoder.totals)
        handle.flush()
        return artifact.entry(Path(handle.name), **counts, **about)


def _closed(ids: np.ndarray, lengths: np.ndarray, encoder: TextEncoder) -> tuple[np.ndarray, np.ndarray]:
    """Put the tokens around documents: that of the begin, if there is one, and that of the end."""
    stops = np.cumsum(lengths)
    if encoder.bos is None:
        return np.insert(ids, stops, encoder.end_of_document), lengths + 1
    places = np.stack([stops - lengths, stops], axis=1).reshape(-1)
    return np.insert(ids, places, np.tile([encoder.bos, encoder.end_of_document], len(lengths))), lengths + 2


def excerpts(shards: Path, text: artifact.Manifest, names: Sequence[str]) -> list[str]:
    """The beginnings of a few documents, from text shards that are evenly spaced in `names`.

    Raises:
        UserError: a shard is missing or corrupt.
    """
    texts: list[str] = []
    for name in names[:: -(-len(names) // EXCERPT_SHARDS) or 1]:
        documents = islice(text_shards.readable(shards, text, name), EXCERPTS)
        texts += [document.decode("utf-8", errors="replace")[:EXCERPT] for document, _ in documents]
    return texts


def ids(path: Path, entry: dict[str, Any]) -> np.ndarray:
    """All tokens of a shard, (tokens,), memory-mapped."""
    dtype = np.dtype(entry["dtype"]).newbyteorder("<")
    if not entry["tokens"]:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r", entry["offset"], (entry["tokens"],)).view(np.ndarray)


def lengths(path: Path, entry: dict[str, Any]) -> np.ndarray:
    """The number of tokens of every document of a shard, (documents,) uint32."""
    return np.fromfile(path, "<u4", entry["documents"], offset=entry["lengths_offset"])


def ends(path: Path, entry: dict[str, Any]) -> np.ndarray:
    """The end of every document of a shard, in tokens of the shard, (documents,) int64."""
    return np.cumsum(lengths(path, entry), dtype=np.int64)


def totals(files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Count shards, documents, bytes of text and tokens: per split, and under "corpora" per split of each corpus."""
    return text_shards.totals(files, ("documents", "text_bytes", "tokens"))


def _npy_header(dtype: np.dtype, count: int) -> bytes:
    """The header of a one-dimensional .npy file, padded to a fixed size."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype.str, "fortran_order": False, "shape": (count,)})
    assert tar.BLOCK + header.tell() == _HEADERS
    return header.getvalue()
