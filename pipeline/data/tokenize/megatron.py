"""Megatron-LM's indexed datasets, `NAME.bin` with the tokens and `NAME.idx` with where each sequence lies.

The index, version 1, little-endian: the bytes MMIDIDX and two zeros, uint64 version, uint8 code of the tokens' type, uint64 sequences,
uint64 documents + 1; int32 length of every sequence, int64 byte in the .bin at which it begins, int64 first sequence of every document, and
the number of sequences once more.
As read and written by megatron.core.datasets.indexed_dataset.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import artifact
from pipeline.data.tokenize import tokens
from pipeline.data.tokenize.tokenizer import TextEncoder, load
from pipeline.errors import UserError
from pipeline.files import atomic_file

_MAGIC, _VERSION = b"MMIDIDX\0\0", 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {"uint16": 8, "uint32": 4}  # there is no code for uint32, and no vocabulary needs its last bit

BLOCK_TOKENS = 1 << 22
"""Tokens that are in memory at a time."""


def write(folder: Path, manifest: artifact.Manifest, shards: Sequence[str], prefix: Path) -> dict[str, dict[str, Any]]:
    """Token shards as one indexed dataset, a sequence a document, end tokens included.

    Args:
        folder: the token shards'.
        manifest: its manifest.
        shards: some of them, in their order.
        prefix: path of both files, without .bin and .idx.

    Returns:
        File name -> the manifest's entry.
    """
    entries = [manifest.files[name] for name in shards]
    dtype = np.dtype(manifest.totals["dtype"])
    binary, index = prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")
    with atomic_file(binary) as handle:
        for name, entry in zip(shards, entries, strict=True):
            with open(folder / name, "rb") as shard:
                shard.seek(entry["offset"])
                left = entry["tokens"] * dtype.itemsize
                while left:
                    block = shard.read(min(left, 1 << 24))
                    assert block, "the shard's checksum was right"
                    left -= len(block)
                    handle.write(block)
    documents = sum(entry["documents"] for entry in entries)
    with atomic_file(index) as handle:
        handle.write(_HEADER.pack(_MAGIC, _VERSION, _CODES[dtype.name], documents, documents + 1))
        for name, entry in zip(shards, entries, strict=True):
            handle.write(tokens.lengths(folder / name, entry).astype("<i4").tobytes())
        start = 0
        for name, entry in zip(shards, entries, strict=True):
            ends = start + np.cumsum(tokens.lengths(folder / name, entry), dtype="<i8") * dtype.itemsize
            handle.write(np.concatenate([[start], ends[:-1]]).astype("<i8")[: len(ends)].tobytes())
            start = int(ends[-1]) if len(ends) else start
        handle.write(np.arange(documents + 1, dtype="<i8").tobytes())
    counts = {"documents": documents, "tokens": sum(entry["tokens"] for entry in entries)}
    return {path.name: artifact.entry(path, **counts) for path in (binary, index)}


class Indexed:
    """An indexed dataset on disk.

    Attributes:
        prefix: path of both files, without .bin and .idx.
        starts: int64 (documents + 1,), the token at which each document begins, and their number.
        tokens: (tokens,) all of them, mapped.
    """

    def __init__(self, prefix: Path) -> None:
        """Read the index.

        Raises:
            UserError: a file is missing, or the index is none, or does not fit the .bin.
        """
        self.prefix = prefix
        binary, index = prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")
        for path in (binary, index):
            if not path.is_file():
                raise self._refusal(f"has no {path.name} beside it", "name a dataset's path without .bin and .idx")
        size = index.stat().st_size
        magic, version, code, sequences, documents = _HEADER.unpack(index.read_bytes()[: _HEADER.size].ljust(_HEADER.size, b"\0"))
        if magic != _MAGIC or version != _VERSION or code not in _TYPES:
            raise self._refusal("is no index of version 1 with whole numbers", "name a dataset that Megatron's preprocessing wrote")
        if size < _HEADER.size + 12 * sequences + 8 * documents or not documents:
            raise self._refusal(f"is cut short: {size} bytes for {sequences} sequences", "copy it again")
        dtype = np.dtype(_TYPES[code])
        lengths = np.memmap(index, "<i4", "r", _HEADER.size, (sequences,)) if sequences else np.empty(0, "<i4")
        pointers = np.memmap(index, "<i8", "r", _HEADER.size + 4 * sequences, (sequences,)) if sequences else np.empty(0, "<i8")
        firsts = np.memmap(index, "<i8", "r", _HEADER.size + 12 * sequences, (documents,))
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        if not np.array_equal(pointers, ends[:-1] * dtype.itemsize) or binary.stat().st_size != ends[-1] * dtype.itemsize:
            raise self._refusal(
                "does not cover the .bin from its start to its end", "merge or write the dataset anew with Megatron's tools"
            )
        if firsts[0] != 0 or firsts[-1] != sequences or np.any(np.diff(firsts) < 0):
            raise self._refusal("has documents out of order", "write the dataset anew with Megatron's tools")
        self.starts = ends[firsts]
        self.tokens = np.memmap(binary, dtype, "r") if ends[-1] else np.empty(0, dtype)

    def _refusal(self, rule: str, fix: str) -> UserError:
        return UserError.of("stage.input", f"{self.prefix}.idx", rule, fix)

    def pieces(self, size: int) -> list[tuple[int, int]]:
        """The (first, stop) documents of shards of about `size` tokens."""
        count = max(1, round(int(self.starts[-1]) / size))
        cuts = np.searchsorted(self.starts, np.arange(1, count) * (int(self.starts[-1]) / count))
        bounds = np.unique([0, *cuts, len(self.starts) - 1]).tolist()
        return list(pairwise(bounds))

    def documents(self, first: int, stop: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(tokens, lengths) of a range of documents, some at a time."""
        while first < stop:
            end = int(np.searchsorted(self.starts, self.starts[first] + BLOCK_TOKENS, side="right")) - 1
            end = min(max(end, first + 1), stop)
            yield np.asarray(self.tokens[self.starts[first] : self.starts[end]]), np.diff(self.starts[first : end + 1])
            first = end


def read(source: Indexed, first: int, stop: int, path: Path, encoder: TextEncoder, about: dict[str, Any]) -> dict[str, Any]:
    """Write documents of an indexed dataset as a token shard; those without an end token get one, empty ones are left out.

    Args:
        source: the dataset.
        first: first document.
        stop: the one after the last.
        path: the token shard to write.
        encoder: the tokenizer that made the tokens.
        about: split and corpus.

    Returns:
        The manifest's entry. Its bytes of text are those of the tokens' text, decoded.

    Raises:
        UserError: a token is not one of the tokenizer's.
    """
    tokenizer, text_bytes = load(encoder.path.parent), 0
    with atomic_file(path) as handle:
        writer = tokens.Writer(handle, path.name.removesuffix(".tar"), encoder.dtype)
        for ids, lengths in source.documents(first, stop):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < encoder.vocab_size:
                rule = f"holds the token {int(ids.max())}, {encoder.path} has {encoder.vocab_size} entries"
                raise UserError.of("tokenizer.path", f"{source.prefix}.bin", rule, "name the tokenizer that made it")
            lengths = lengths[lengths > 0]
            ends = np.cumsum(lengths)
            open_ones = ids[ends - 1] != encoder.end_of_document
            ids, lengths = np.insert(ids, ends[open_ones], encoder.end_of_document), lengths + open_ones
            writer.add(ids, lengths)
            documents = np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else []
            text_bytes += sum(len(text.encode()) for text in tokenizer.decode_batch([document[:-1].tolist() for document in documents]))
        made = {"vocab_size": encoder.vocab_size, "end_of_document": encoder.end_of_document, "tokenizer": encoder.fingerprint}
        counts = writer.close(text_bytes=text_bytes, **about, **made)
    return artifact.entry(path, **counts, text_bytes=text_bytes, **about)
