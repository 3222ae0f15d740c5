"""Exports a checkpoint in the distributed format of Megatron-Core (torch_dist), which its GPTModel loads in any layout.

The folder `release` is what Megatron-LM expects of converted weights: `--load OUTPUT --no-load-optim --no-load-rng --use-checkpoint-args`.
Layers are stacked along dim 0 of a stored tensor, and experts along the next one; a file has one chunk for each weight of the model.
Megatron-Core is not needed to write it: the format is that of torch.distributed.checkpoint.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint.weights import PartReader, Weights
from pipeline.common.atomic_files import atomic_file
from pipeline.conversion.export_files import ExportWriter, OutputFile, Written, digest_of
from pipeline.conversion.megatron_layout import Chunk, arguments, chunks, layer_states
from pipeline.models.config import ModelConfig
from pipeline.models.stock_tensors import Shape

FOLDER, TRACKER = "release", "latest_checkpointed_iteration.txt"


def write(
    folder: Path, weights: Weights, config: ModelConfig, *, dtype: torch.dtype, shard_bytes: int, tokenizer: str, writer: ExportWriter
) -> int:
    """Write `release` with its files, and the file that names it, and return the number of parameters. Collective.

    Args:
        shard_bytes: maximum file size; a larger weight gets a separate file.
        tokenizer: path of the tokenizer that Megatron-LM is told.

    Raises:
        UserError: a weight is too large for the dtype.
        CheckFailed: a file does not hold the weights of the checkpoint.
    """
    shards: list[_ChunkFile] = []
    for chunk in chunks(config):
        size = prod(chunk.tensor.shape([weights.shape(name) for name in chunk.tensor.names])) * dtype.itemsize
        if not shards or shards[-1].bytes + size > shard_bytes:
            shards.append(_ChunkFile(weights, config, dtype))
        shards[-1].add(chunk, size)
    files = [OutputFile(f"__{number}_0.distcp", shard.bytes, shard.write, shard.read) for number, shard in enumerate(shards)]
    (folder / FOLDER).mkdir(exist_ok=True)
    places = writer.write(folder / FOLDER, files)
    if writer.is_first:
        stored = {file.name: (shard, places[file.name]) for file, shard in zip(files, shards, strict=True)}
        _write_index(folder / FOLDER, stored, config)
        content = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
        (folder / FOLDER / "metadata.json").write_text(json.dumps(content), encoding="utf-8")
        common = {"args": arguments(config, dtype, tokenizer), "checkpoint_version": 3.0, "iteration": 0}
        (folder / FOLDER / "common.pt").write_bytes(_saved(common))
        (folder / TRACKER).write_text(FOLDER, encoding="utf-8")
    return sum(prod(weights.shape(name)) for name in weights.names())


class _ChunkFile:
    """A file with the chunks of some weights, each an archive of torch.save; see OutputFile."""

    def __init__(self, weights: Weights, config: ModelConfig, dtype: torch.dtype) -> None:
        self.chunks: list[Chunk] = []
        self.bytes = 0
        self._places: list[tuple[int, int]] = []
        self.dtype = dtype
        self._weights, self._config = weights, config

    def add(self, chunk: Chunk, size: int) -> None:
        """Append a chunk of that many bytes."""
        self.chunks.append(chunk)
        self.bytes += size

    def box(self, chunk: Chunk) -> tuple[Shape, Shape, Shape]:
        """See Chunk.box."""
        return chunk.box(chunk.tensor.shape(self._shapes(chunk)), self._config)

    def write(self, path: Path, written: Written) -> tuple[list[tuple[int, int]], None]:
        """Write the file; the index needs first byte and length of each chunk."""
        read = PartReader(self._weights, self.dtype)
        self._places = []
        with open(path, "wb") as handle:
            for chunk in self.chunks:
                parts = read(chunk.tensor)
                size = self.box(chunk)[2]
                value = chunk.tensor.to_hf(parts).view(size)
                if value.untyped_storage().nbytes() > value.nbytes:  # torch.save writes all of it
                    value = value.clone()
                start = handle.tell()
                torch.save(value, handle)
                self._places.append((start, handle.tell() - start))
                expert = chunk.tensor.expert
                pieces = [part if expert is None else part[expert] for part in parts]
                written(f"{chunk.key} {self.box(chunk)[1]}", digest_of(pieces), value.nbytes)
        return self._places, None

    def read(self, path: Path) -> Iterator[tuple[str, str]]:
        """Yield what the file holds, as weights of the checkpoint."""
        with open(path, "rb") as handle:
            for chunk, (start, length) in zip(self.chunks, self._places, strict=True):
                handle.seek(start)
                value = torch.load(io.BytesIO(handle.read(length)), weights_only=True)
                shapes = self._shapes(chunk)
                parts = chunk.tensor.from_hf(value.view(chunk.tensor.shape(shapes)), shapes)
                yield f"{chunk.key} {self.box(chunk)[1]}", digest_of(parts)

    def _shapes(self, chunk: Chunk) -> list[Shape]:
        return [self._weights.shape(name) for name in chunk.tensor.names]


def _write_index(folder: Path, stored: dict[str, tuple[_ChunkFile, list[tuple[int, int]]]], config: ModelConfig) -> None:
    """Write .metadata, which says where each chunk is, and the states of layers that Megatron-Core expects beside weights, all empty.

    Args:
        folder: with the files.
        stored: file name -> its chunks, and first byte and length of each.
    """
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    tensors: dict[str, Any] = {}
    storage: dict[dcp.MetadataIndex, _StorageInfo] = {}
    for file, (shard, places) in stored.items():
        for chunk, (start, length) in zip(shard.chunks, places, strict=True):
            full, first, size = shard.box(chunk)
            properties = dcp.TensorProperties(dtype=shard.dtype)
            entry = tensors.setdefault(chunk.key, dcp.TensorStorageMetadata(properties, torch.Size(full), []))
            entry.chunks.append(dcp.ChunkStorageMetadata(torch.Size(first), torch.Size(size)))
            storage[dcp.MetadataIndex(chunk.key, first)] = _StorageInfo(file, start, length)
    states, empty = f"__{len(stored)}_0.distcp", _saved([None])
    (folder / states).write_bytes(empty)
    for key in layer_states(config):
        tensors[key] = dcp.BytesStorageMetadata()
        storage[dcp.MetadataIndex(key)] = _StorageInfo(states, 0, len(empty))
    with atomic_file(folder / ".metadata") as handle:
        pickle.dump(dcp.Metadata(tensors, storage_data=storage), handle)


def _saved(content: Any) -> bytes:
    """Return what torch.save writes; given a path, it reports a full disk by an error that does not name it."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()
