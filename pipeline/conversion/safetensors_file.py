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
import xxhash
from torch import Tensor

from pipeline.conversion.export_files import buffer_of

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
) -> str:
    """Write a file in one sequential pass, and return its xxh3-128 checksum.

    Args:
        path: of the file.
        shapes: of the tensors, in the order in which they are written.
        dtype: of all tensors.
        tensor: returns the tensor of a name; called once for each, in order.
        metadata: entries of `__metadata__`.
    """
    header = header_of(shapes, dtype, metadata)
    state = xxhash.xxh3_128(header)
    with open(path, "wb") as handle:
        handle.write(header)
        for name, shape in shapes.items():
            value = tensor(name)
            assert tuple(value.shape) == tuple(shape), f"{name} is {tuple(value.shape)}, not {tuple(shape)}"
            assert value.dtype == dtype, f"{name} is {value.dtype}, not {dtype}"
            data = buffer_of(value)
            state.update(data)
            handle.write(data)
    return state.hexdigest()


def tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a file of one dtype, in the order of their data. The next tensor overwrites the memory of a tensor."""
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    with open(path, "rb") as handle:
        header = json.loads(handle.read(int.from_bytes(handle.read(8), "little")))
        header.pop("__metadata__", None)
        sizes = [entry["data_offsets"][1] - entry["data_offsets"][0] for entry in header.values()]
        memory = torch.empty(max(sizes, default=0), dtype=torch.uint8)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, end = entry["data_offsets"]
            data = memory[: end - start]
            handle.readinto(buffer_of(data))
            yield name, data.view(dtypes[entry["dtype"]]).view(entry["shape"])
