"""The tensors of a folder of torch.distributed.checkpoint (DCP), read one at a time, or a slice of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from pipeline.common.errors import UserError, Violation
from pipeline.conversion import safe_pickle
from pipeline.conversion.foreign_weights import Source

INDEX = ".metadata"


def step_folder(folder: Path) -> Path | None:
    """Return the folder of one step: the folder itself, or the only one below it (torchtitan: step-1000).

    Raises:
        UserError: there are several.
    """
    if (folder / INDEX).is_file():
        return folder
    steps = sorted(path.parent.name for path in folder.glob(f"*/{INDEX}"))
    if len(steps) > 1:
        rule = f"has the checkpoints {', '.join(steps)}"
        raise UserError.of("stage.input", folder, rule, f"name one: stage.input={folder / steps[-1]}")
    return folder / steps[0] if steps else None


class DcpFolder(Source):
    """The tensors of a step, by the names of its state dict."""

    def __init__(self, folder: Path) -> None:
        """Read the index and verify that the files are there, in their length.

        Raises:
            UserError: a file is missing or truncated, or the index is damaged.
        """
        self.path = folder
        self._index = safe_pickle.load_index(folder / INDEX)
        self._tensors = {name: entry for name, entry in self._index.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)}
        ends: dict[str, int] = {}
        for info in (self._index.storage_data or {}).values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        problems = [(name, problem) for name, end in sorted(ends.items()) if (problem := _file_problem(folder / name, end))]
        if problems:
            fix = "copy the whole folder of the checkpoint"
            raise UserError([Violation("stage.input", folder / name, problem, fix) for name, problem in problems])
        self._reader = _Reader(folder, self._index)

    def files(self) -> list[Path]:
        """The index, and the files with the tensors."""
        return [self.path / INDEX, *sorted({self.path / info.relative_path for info in (self._index.storage_data or {}).values()})]

    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def meta(self, name: str) -> list[Tensor]:
        """Shape and dtype of a tensor."""
        entry = self._tensors[name]
        return [torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")]

    def shards(self, name: str) -> list[Tensor]:
        """The tensor."""
        return [self.read(name)]

    def read(self, name: str, index: Sequence[int] = ()) -> Tensor:
        """Return a tensor, or the part with some first indices.

        Raises:
            UserError: a part of it is damaged, or no file has it.
        """
        entry = self._tensors[name]
        sizes = [1] * len(index) + list(entry.size[len(index) :])
        offsets = [*index] + [0] * (len(sizes) - len(index))
        out = torch.empty(sizes, dtype=entry.properties.dtype)
        box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(name, entry, [box])
        elements = sum(item.lengths.numel() for item in items)
        if elements != out.numel():
            rule = f"has {elements} of {out.numel()} elements of {name}"
            raise UserError.of("stage.input", self.path, rule, "copy the whole folder of the checkpoint")
        try:
            self._reader.read_data(LoadPlan(items), _Into(out)).wait()
        except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
            rule = f"{name} is not readable: {error}"
            raise UserError.of("stage.input", self.path, rule, "copy the whole folder of the checkpoint") from error
        return out.reshape(sizes[len(index) :])


def _file_problem(path: Path, end: int) -> str | None:
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    return f"is truncated: it has {size} bytes, and the index names {end}" if size < end else None


class _Reader(FileSystemReader):
    """DCP's reader of files, with an index that has been read already."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self.set_up_storage_reader(index, is_coordinator=True)


class _Into(DefaultLoadPlanner):
    """Reads parts into one tensor."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self._out = out

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the part of the tensor that an item fills."""
        part = self._out
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Any) -> None:
        """Do nothing: the tensor is a view."""
