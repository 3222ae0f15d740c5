"""Safetensors files: written and read with one tensor in memory at a time.

The package safetensors writes a file from tensors that are all in memory, and maps a file that it reads, whose pages then count as
memory of the process. The format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from pipeline.conversion.export_files import buffer_of

#: Names of dtypes in the header, in the order of the package, which writes the tensors of the last one first.
DTYPES = {
    torch.int8: "I8",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.float32: "F32",
    torch.int64: "I64",
}
#: Bytes that are copied at once.
_CHUNK = 16 << 20


def _header(entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Return what precedes the data: the length of the header and the header, padded so that the data is aligned to 8 bytes."""
    content: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in entries.items():
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
        shapes: of the tensors, in the order in which they are written.
        tensor: returns the tensor of a name; called once for each, in order.
        metadata: entries of `__metadata__`.
    """
    header = _header({name: (dtype, shape) for name, shape in shapes.items()}, metadata)
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


def write_mixed(path: Path, tensors: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]) -> list[str]:
    """Write tensors of several dtypes, in the order of the package: larger elements first, so that all are aligned, then by name.

    The sizes are not known in advance: the data is first written to a file without a name in the same folder.

    Args:
        tensors: names and values; one at a time is in memory.
        metadata: entries of `__metadata__`.

    Returns:
        The names in the order of their data.
    """
    entries: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    places: dict[str, tuple[int, int]] = {}
    with tempfile.TemporaryFile(dir=path.parent) as collected:
        for name, value in tensors:
            data = buffer_of(value)
            entries[name], places[name] = (value.dtype, tuple(value.shape)), (collected.tell(), data.nbytes)
            collected.write(data)
        dtypes = list(DTYPES)
        names = sorted(entries, key=lambda name: (-dtypes.index(entries[name][0]), name))
        with open(path, "wb") as handle:
            handle.write(_header({name: entries[name] for name in names}, metadata))
            for name in names:
                start, size = places[name]
                collected.seek(start)
                for done in range(0, size, _CHUNK):
                    handle.write(collected.read(min(_CHUNK, size - done)))
    return names


def tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of a file, in the order of their data. The next tensor overwrites the memory of a tensor."""
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
