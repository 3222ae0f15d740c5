"""Token shards: a WebDataset tar on the outside, one numpy array that is addressed by file offset on the inside.

A shard is one sample: `.tokens.npy` (uint16 or uint32, tokens) holds the documents one after another, each closed by the end-of-document
token, `.lengths.npy` (uint32, documents) the tokens of every document, `.json` says what they are. The tokens come first and go to the file
as they are made, so that memory does not grow with the shard; the headers before them, of fixed size, follow when their number is known.
"""

from __future__ import annotations

import heapq
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from pipeline import artifact
from pipeline.data import tar
from pipeline.data.shard import text_shards
from pipeline.data.tokenize.engines import EXCERPT, Engine
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.files import atomic_file

BATCH_BYTES = 1 << 20
"""Text that is handed to the tokenizer at once; its ids still fit into a core's cache."""

_HEADERS = tar.BLOCK + 128
"""Bytes before the first token: the tar's header and numpy's, which has this length for any array of one dimension."""

EXCERPT_SHARDS, EXCERPTS = 8, 4
"""Text shards of which a sample is taken, at most, and documents of each."""

SPLITS = ("train", "validation")


def share(sizes: dict[str, int], rank: int, ranks: int) -> list[str]:
    """The shards of one rank, by name. They are dealt out largest first, each to the rank that has the least so far."""
    loads = [(0, number) for number in range(ranks)]
    mine = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, number = loads[0]
        heapq.heapreplace(loads, (load + sizes[name], number))
        if number == rank:
            mine.append(name)
    return sorted(mine)


class Writer:
    """One token shard on its way to its file: documents are added, close() completes it.

    Args:
        handle: the file, empty.
        stem: name of the shard's only sample.
        dtype: "<u2" or "<u4".
    """

    def __init__(self, handle: IO[bytes], stem: str, dtype: np.dtype) -> None:
        self._handle, self._stem, self._dtype = handle, stem, dtype
        self._lengths = [np.empty(0, "<u4")]
        self._tokens = 0
        handle.seek(_HEADERS)

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents.

        Args:
            tokens: (tokens,) all documents with their end tokens.
            lengths: (documents,) tokens of each.
        """
        self._handle.write(tokens.astype(self._dtype, copy=False).data)
        self._lengths.append(lengths.astype("<u4"))
        self._tokens += len(tokens)

    def close(self, **about: Any) -> dict[str, Any]:
        """Write everything but the tokens.

        Args:
            about: what else is known; goes into the shard's `.json`.

        Returns:
            What the manifest's entry needs to address the shard: dtype, tokens, documents and the offsets of both arrays.
        """
        lengths, handle = np.concatenate(self._lengths), self._handle
        content = _HEADERS - tar.BLOCK + self._tokens * self._dtype.itemsize
        counts = {"dtype": self._dtype.name, "tokens": self._tokens, "documents": len(lengths)}
        handle.write(tar.padding(content))
        after = handle.tell()
        handle.write(tar.member(f"{self._stem}.lengths.npy", _npy_header(lengths.dtype, len(lengths)) + lengths.tobytes()))
        handle.write(tar.member(f"{self._stem}.json", json.dumps({**counts, **about}).encode()))
        handle.write(tar.END)
        handle.seek(0)
        handle.write(tar.header(f"{self._stem}.tokens.npy", content) + _npy_header(self._dtype, self._tokens))
        return {**counts, "offset": _HEADERS, "lengths_offset": after + _HEADERS}


def write(
    shards: Path, text: artifact.Manifest, name: str, path: Path, encoder: TextEncoder, engine: Engine, progress: Callable[[int], None]
) -> dict[str, Any]:
    """Tokenize one text shard, which is read once and held against its checksum meanwhile.

    Args:
        shards: folder of the text shards.
        text: its manifest.
        name: the text shard.
        path: the token shard to write.
        encoder: the tokenizer.
        engine: what turns its text into ids.
        progress: told the bytes of text as they are done.

    Returns:
        The manifest's entry: length, checksum, dtype, counts, and the offsets in the file of the first token and of the first length.

    Raises:
        UserError: the text shard is missing or corrupt; nothing is written.
    """
    noted, text_bytes = text.files[name], 0
    with atomic_file(path) as handle:
        writer = Writer(handle, path.name.removesuffix(".tar"), encoder.dtype)
        with artifact.open_verified(shards, text, name) as shard:
            for batch in _batches(text_shards.texts(shard)):
                ids, lengths = engine.encode([document.decode("utf-8") for document in batch])
                writer.add(np.insert(ids.astype(encoder.dtype), np.cumsum(lengths), encoder.end_of_document), lengths + 1)
                done = sum(map(len, batch))
                text_bytes += done
                progress(done)
        about = {"text_bytes": text_bytes, "split": noted["split"], "corpus": noted["corpus"]}
        made = {"vocab_size": encoder.vocab_size, "end_of_document": encoder.end_of_document, "tokenizer": encoder.fingerprint}
        counts = writer.close(**about, **made)
    return artifact.entry(path, **counts, **about)


def excerpts(shards: Path, text: artifact.Manifest, names: Sequence[str]) -> list[str]:
    """The beginnings of a few documents from text shards that are spread evenly over the named ones.

    Raises:
        UserError: a shard is missing or corrupt.
    """
    found: list[str] = []
    for name in names[:: -(-len(names) // EXCERPT_SHARDS) or 1]:
        documents = islice(text_shards.readable(shards, text, name), EXCERPTS)
        found += [document.decode("utf-8", errors="replace")[:EXCERPT] for document, _ in documents]
    return found


def ids(path: Path, entry: dict[str, Any]) -> np.ndarray:
    """All tokens of a shard, (tokens,), mapped.

    Args:
        path: the shard.
        entry: what the manifest says of it.
    """
    dtype = np.dtype(entry["dtype"]).newbyteorder("<")
    if not entry["tokens"]:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r", entry["offset"], (entry["tokens"],)).view(np.ndarray)


def lengths(path: Path, entry: dict[str, Any]) -> np.ndarray:
    """The tokens of every document of a shard, (documents,) uint32."""
    return np.fromfile(path, "<u4", entry["documents"], offset=entry["lengths_offset"])


def totals(files: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Shards, documents, bytes of text and tokens: of each split, and under "corpora" of each split of each corpus."""
    shards = [entry for entry in files.values() if "split" in entry]
    corpora = sorted({entry["corpus"] for entry in shards})
    return {
        **_by_split(shards),
        "corpora": {corpus: _by_split([entry for entry in shards if entry["corpus"] == corpus]) for corpus in corpora},
    }


def _by_split(shards: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    return {split: _counts([entry for entry in shards if entry["split"] == split]) for split in SPLITS}


def _counts(shards: list[dict[str, Any]]) -> dict[str, int]:
    names = {"documents": "documents", "bytes": "text_bytes", "tokens": "tokens"}
    return {"shards": len(shards), **{name: sum(entry[key] for entry in shards) for name, key in names.items()}}


def _batches(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The documents, about BATCH_BYTES at a time."""
    batch: list[bytes] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _npy_header(dtype: np.dtype, count: int) -> bytes:
    """What a .npy file of one dimension begins with."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": dtype.str, "fortran_order": False, "shape": (count,)})
    assert tar.BLOCK + header.tell() == _HEADERS
    return header.getvalue()
