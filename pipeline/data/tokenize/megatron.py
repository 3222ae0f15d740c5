"""Megatron-LM's indexed datasets: `NAME.bin` contains the tokens, `NAME.idx` the length and offset of each sequence.

The index, version 1, little-endian: the bytes MMIDIDX and two zero bytes, uint64 version, uint8 dtype code, uint64 sequences,
uint64 documents + 1; int32 length of every sequence, int64 byte offset of every sequence in the .bin, int64 first sequence of every
document, followed by the number of sequences.
This is the format of megatron.core.datasets.indexed_dataset.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.common import artifact
from pipeline.common.atomic_files import atomic_file, digest
from pipeline.common.errors import UserError, collect_errors
from pipeline.config.data import TokenizerConfig
from pipeline.data.shard.text_shards import SPLITS
from pipeline.data.tokenize import token_shards
from pipeline.data.tokenize.tokenizer import TextEncoder, load

_MAGIC, _VERSION = b"MMIDIDX\0\0", 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CODES = {"uint16": 8, "uint32": 4}  # there is no code for uint32; no vocabulary needs its most significant bit

BLOCK_TOKENS = 1 << 22
"""Maximum number of tokens in memory, unless a single document is longer."""


def write(folder: Path, manifest: artifact.Manifest, shards: Sequence[str], prefix: Path) -> dict[str, dict[str, Any]]:
    """Write token shards as one indexed dataset with one sequence per document, end-of-document tokens included.

    `prefix` is the path of both files without .bin and .idx. Returns file name -> its manifest entry.
    """
    entries = [manifest.files[name] for name in shards]
    dtype = np.dtype(manifest.totals["dtype"])
    binary, index = prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")
    with atomic_file(binary) as handle:
        for name, entry in zip(shards, entries, strict=True):
            handle.write(token_shards.ids(folder / name, entry).data)  # mapped, not read at once
    documents = sum(entry["documents"] for entry in entries)
    with atomic_file(index) as handle:
        handle.write(_HEADER.pack(_MAGIC, _VERSION, _CODES[dtype.name], documents, documents + 1))
        for name, entry in zip(shards, entries, strict=True):
            handle.write(token_shards.lengths(folder / name, entry).astype("<i4").tobytes())
        start = 0
        for name, entry in zip(shards, entries, strict=True):
            ends = start + np.cumsum(token_shards.lengths(folder / name, entry), dtype="<i8") * dtype.itemsize
            handle.write(np.concatenate([[start], ends[:-1]]).astype("<i8")[: len(ends)].tobytes())
            start = int(ends[-1]) if len(ends) else start
        handle.write(np.arange(documents + 1, dtype="<i8").tobytes())
    counts = {"documents": documents, "tokens": sum(entry["tokens"] for entry in entries)}
    return {path.name: artifact.entry(path, **counts) for path in (binary, index)}


class IndexedDataset:
    """An indexed dataset on disk.

    Attributes:
        prefix: path of both files, without .bin and .idx.
        starts: int64 (documents + 1,), the first token of each document, and the number of tokens.
        tokens: (tokens,) all tokens, memory-mapped.
    """

    def __init__(self, prefix: Path) -> None:
        """Read the index.

        Raises:
            UserError: a file is missing, or the index is invalid or does not match the .bin.
        """
        self.prefix = prefix
        binary, index = prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")
        for path in (binary, index):
            if not path.is_file():
                raise self._error(f"requires {path.name} in the same folder", "set the path of a dataset without .bin and .idx")
        size = index.stat().st_size
        magic, version, code, sequences, documents = _HEADER.unpack(index.read_bytes()[: _HEADER.size].ljust(_HEADER.size, b"\0"))
        if magic != _MAGIC or version != _VERSION or code not in _TYPES:
            raise self._error("is not an index of version 1 with an integer dtype", "use a dataset that Megatron's preprocessing wrote")
        if size < _HEADER.size + 12 * sequences + 8 * documents or not documents:
            raise self._error(f"is truncated: {size} bytes for {sequences} sequences", "copy it again")
        dtype = np.dtype(_TYPES[code])
        lengths = np.memmap(index, "<i4", "r", _HEADER.size, (sequences,)) if sequences else np.empty(0, "<i4")
        pointers = np.memmap(index, "<i8", "r", _HEADER.size + 4 * sequences, (sequences,)) if sequences else np.empty(0, "<i8")
        firsts = np.memmap(index, "<i8", "r", _HEADER.size + 12 * sequences, (documents,))
        ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        if not np.array_equal(pointers, ends[:-1] * dtype.itemsize) or binary.stat().st_size != ends[-1] * dtype.itemsize:
            raise self._error("does not cover the full .bin", "merge or write the dataset again with Megatron's tools")
        if firsts[0] != 0 or firsts[-1] != sequences or np.any(np.diff(firsts) < 0):
            raise self._error("has documents out of order", "write the dataset again with Megatron's tools")
        self.starts = ends[firsts]
        self.tokens = np.memmap(binary, dtype, "r") if ends[-1] else np.empty(0, dtype)

    def _error(self, rule: str, fix: str) -> UserError:
        return UserError.of("stage.input", f"{self.prefix}.idx", rule, fix)

    def partition(self, size: int) -> list[tuple[int, int]]:
        """Partition the documents into ranges (first, stop) of about `size` tokens."""
        count = max(1, round(int(self.starts[-1]) / size))
        splits = np.searchsorted(self.starts, np.arange(1, count) * (int(self.starts[-1]) / count))
        bounds = np.unique([0, *splits, len(self.starts) - 1]).tolist()
        return list(pairwise(bounds))

    def documents(self, first: int, stop: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (tokens, lengths) of a range of documents, in blocks of about BLOCK_TOKENS tokens."""
        while first < stop:
            end = int(np.searchsorted(self.starts, self.starts[first] + BLOCK_TOKENS, side="right")) - 1
            end = min(max(end, first + 1), stop)
            yield np.asarray(self.tokens[self.starts[first] : self.starts[end]]), np.diff(self.starts[first : end + 1])
            first = end


def write_shard(source: IndexedDataset, first: int, stop: int, path: Path, encoder: TextEncoder, about: dict[str, Any]) -> dict[str, Any]:
    """Write a range of documents of an indexed dataset as a token shard.

    Empty documents are skipped. An end-of-document token is appended to documents that do not end with one.

    Args:
        stop: one past the last document.
        about: split and corpus.

    Returns:
        The manifest entry. Its text_bytes are the bytes of the decoded tokens.

    Raises:
        UserError: a token is not in the tokenizer's vocabulary.
    """
    tokenizer, text_bytes = load(encoder.path.parent), 0
    with atomic_file(path) as handle:
        writer = token_shards.ShardWriter(handle, path.name.removesuffix(".tar"), encoder.dtype)
        for ids, lengths in source.documents(first, stop):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < encoder.vocab_size:
                rule = f"contains the token {int(ids.max())}, {encoder.path} has {encoder.vocab_size} entries"
                raise UserError.of("tokenizer.path", f"{source.prefix}.bin", rule, "set the tokenizer that created it")
            lengths = lengths[lengths > 0]
            ends = np.cumsum(lengths)
            unterminated = ids[ends - 1] != encoder.end_of_document
            ids, lengths = np.insert(ids, ends[unterminated], encoder.end_of_document), lengths + unterminated
            writer.add(ids, lengths)
            documents = np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else []
            text_bytes += sum(len(text.encode()) for text in tokenizer.decode_batch([document[:-1].tolist() for document in documents]))
        counts = writer.close(text_bytes=text_bytes, **about, **encoder.totals)
    return artifact.entry(path, **counts, text_bytes=text_bytes, **about)


ShardDocuments = tuple[IndexedDataset, int, int, dict[str, Any]]
"""The documents of a shard: dataset, index of the first document, index after the last one, and {"split", "corpus"} of the shard."""


def plan_shards(
    datasets: Sequence[str], tokenizer: TokenizerConfig, shard_megabytes: float
) -> tuple[dict[str, ShardDocuments], TextEncoder]:
    """Return shard name -> documents of the shard, and the tokenizer.

    Args:
        datasets: paths without .bin and .idx; the prefix train- or validation- selects the split, the remainder is the corpus.
        shard_megabytes: size of a shard, 10**6 bytes.

    Raises:
        UserError: a dataset or the tokenizer is invalid.
    """
    if not datasets:
        raise UserError.of(
            "stage.input", "[]", "contains no dataset", "set it to datasets without .bin and .idx: 'stage.input=[data/train-text]'"
        )
    *indexed, encoder = collect_errors(
        *(lambda name=name: IndexedDataset(Path(name)) for name in datasets),
        lambda: TextEncoder(Path(tokenizer.path), tokenizer.end_of_document, "none" if tokenizer.bos == "auto" else tokenizer.bos),
    )
    plan: dict[str, ShardDocuments] = {}
    for dataset in indexed:
        split, _, corpus = dataset.prefix.name.partition("-")
        if split not in SPLITS or not corpus:
            split, corpus = "train", dataset.prefix.name
        stem = split if corpus == "default" else f"{split}-{corpus}"
        if f"{stem}-00000.tar" in plan:
            rule = f"maps to the {split} split of the corpus {corpus}, as another dataset does"
            raise UserError.of("stage.input", dataset.prefix, rule, "rename one of the datasets, or merge them")
        ranges = dataset.partition(max(1, round(shard_megabytes * 1e6 / encoder.dtype.itemsize)))
        for number, (first, stop) in enumerate(ranges):
            plan[f"{stem}-{number:05d}.tar"] = dataset, first, stop, {"split": split, "corpus": corpus}
    if not any(metadata["split"] == "train" for *_, metadata in plan.values()):
        raise UserError.of("stage.input", datasets, "contains no training documents", "add a dataset of the train split")
    return plan, encoder


def fingerprint(prefix: Path) -> list[str]:
    """Return the checksums of both files of an indexed dataset."""
    return [digest(prefix.with_name(f"{prefix.name}{suffix}")) for suffix in (".bin", ".idx")]
