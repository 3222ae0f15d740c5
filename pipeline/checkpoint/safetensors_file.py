"""Safetensors files: written and read with one tensor in memory at a time.

The package safetensors writes a file from tensors that are all in memory, and maps a file that it reads, whose pages then count as
memory of the process. The format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint.export_files import buffer_of

#: Names of dtypes in the header.
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def header_of(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, metadata: Mapping[str, str]) -> bytes:
    """Return what precedes the data: the length of the header and the header, padded so that the data is aligned to 8 bytes.

    Args:
        shapes: of the tensors, in the order of their data.
        dtype: of all tensors.
        metadata: entries of `__metadata__`.
    """
    content: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        content[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    header = json.dumps(content, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def write(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, tensor: Callable[[str], Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a file in one sequential pass.

    Args:
        path: of the file.
        shapes: of the tensors, in the order in which they are written.
        dtype: of all tensors.
        tensor: returns the tensor of a name; called once for each, in order.
        metadata: entries of `__metadata__`.
    """
    with open(path, "wb") as handle:
        handle.write(header_of(shapes, dtype, metadata))
        for name, shape in shapes.items():
            value = tensor(name)
            assert tuple(value.shape) == tuple(shape), f"{name} is {tuple(value.shape)}, not {tuple(shape)}"
            assert value.dtype == dtype, f"{name} is {value.dtype}, not {dtype}"
            handle.write(buffer_of(value))


def tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a file of one dtype, in the order of their data."""
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    with open(path, "rb") as handle:
        header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            value = torch.empty(entry["shape"], dtype=dtypes[entry["dtype"]])
            handle.readinto(buffer_of(value))
            yield name, value
