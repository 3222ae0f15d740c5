"""GGUF, the format of llama.cpp. Written by the package gguf, with one tensor in memory at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint.weights import Weights, rounded
from pipeline.common.errors import UserError
from pipeline.conversion.export_files import ExportWriter, OutputFile, Written, buffer_of, digest_of
from pipeline.models.config import ModelConfig
from pipeline.quantization import gguf_architectures, gguf_layout
from pipeline.quantization.gguf_tokens import Tokens

FILE = "model.gguf"
#: stage.quantize (or the dtype, without it) -> type of matrices, and the number of the file type of llama.cpp.
_TYPES = {"fp32": ("F32", 0), "fp16": ("F16", 1), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7), "q4_0": ("Q4_0", 2)}
#: Types of GGUF that PyTorch has.
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def check(config: ModelConfig, quantize: str) -> None:
    """Refuse a model or a type that cannot be written.

    Raises:
        UserError: it is not supported, or the package gguf is missing.
    """
    if quantize == "q4_k":
        rule = "cannot be written: the package gguf decodes this type, and does not encode it"
        raise UserError.of("stage.quantize", quantize, rule, "set stage.quantize=q4_0 (4.5 bits), or convert a q8_0 file by llama-quantize")
    try:
        import gguf  # noqa: F401
    except ModuleNotFoundError:
        raise UserError.of("stage.format", "gguf", "requires the package gguf", "pip install '.[gguf]'") from None
    gguf_architectures.check(config)


def write(
    folder: Path, weights: Weights, config: ModelConfig, tokens: Tokens, *, kind: str, name: str, writer: ExportWriter | None = None
) -> int:
    """Write model.gguf. Collective.

    Args:
        folder: existing output folder.
        weights: weights of the checkpoint.
        tokens: the tokenizer.
        kind: stage.quantize, or fp32, bf16 or fp16. Matrices have this type, vectors are fp32. A matrix whose rows are no multiple of its
            blocks of 32 weights is stored as F16.
        name: general.name.
        writer: writes the file; by default this process does.

    Returns:
        Number of parameters written.

    Raises:
        UserError: a weight is too large for fp16.
        CheckFailed: the file does not hold the weights of the checkpoint.
    """
    stored = _Stored(weights, config, tokens, kind, name)
    (writer or ExportWriter()).write(folder, [OutputFile(FILE, stored.bytes, stored.write, stored.read)])
    return sum(prod(shape) for row, shape, _ in stored.rows if row.tensor.names)


class _Stored:
    """The file; arguments as those of write. See OutputFile.

    Attributes:
        rows: its tensors, with shape and type.
        bytes: of its tensors.
    """

    def __init__(self, weights: Weights, config: ModelConfig, tokens: Tokens, kind: str, name: str) -> None:
        from gguf import GGMLQuantizationType
        from gguf.quants import quant_shape_to_byte_shape

        self._weights, self._config, self._tokens, self._kind, self._name = weights, config, tokens, kind, name
        wanted, plain, fallback = (GGMLQuantizationType[type_] for type_ in (_TYPES[kind][0], "F32", "F16"))
        self.rows: list[tuple[gguf_layout.GGUFTensor, tuple[int, ...], Any]] = []
        for row in gguf_layout.rows(config):
            shape = row.shape(self._shapes(row))
            blocked = kind.startswith("q") and shape[-1] % 32 != 0
            self.rows.append((row, shape, plain if len(shape) == 1 or row.is_plain else fallback if blocked else wanted))
        self._byte_shapes = [quant_shape_to_byte_shape(shape, type_) for _, shape, type_ in self.rows]
        self.bytes = sum(prod(shape) for shape in self._byte_shapes)

    def write(self, path: Path, written: Written) -> tuple[None, None]:
        """Write the file."""
        from gguf import GGUFWriter
        from gguf.quants import quantize

        writer = GGUFWriter(path, gguf_architectures.architecture_of(self._config).name)
        gguf_layout.add_settings(writer, self._config, self._tokens, name=self._name, file_type=_TYPES[self._kind][1])
        for (row, _, type_), shape in zip(self.rows, self._byte_shapes, strict=True):
            writer.add_tensor_info(row.name, shape, np.dtype(np.uint8), prod(shape), raw_dtype=type_)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for row, _, type_ in self.rows:
            dtype = _DTYPES.get(type_.name, torch.float32)
            first = dtype if row.change is None else torch.float32  # a changed tensor is rounded once, too
            parts = [rounded(self._weights.tensor(part), first, part) for part in row.tensor.names]
            value = rounded(row.to_file(parts), dtype, row.name)
            data = np.frombuffer(buffer_of(value), np.uint8) if type_.name in _DTYPES else quantize(value.numpy(), type_).view(np.uint8)
            writer.write_tensor_data(data)
            of_bytes = type_.name not in _DTYPES or row.change is not None
            written(row.name, digest_of([torch.from_numpy(data.reshape(-1).copy())] if of_bytes else parts), data.nbytes)
        writer.close()
        return None, None

    def read(self, path: Path) -> Iterator[tuple[str, str]]:
        """Yield what gguf finds in the file; a rounded or a changed tensor as its bytes."""
        stored = _File(path)
        for row, _, type_ in self.rows:
            if type_.name not in _DTYPES or row.change is not None:
                yield row.name, digest_of([torch.from_numpy(stored.bytes_of(row.name))])
                continue
            yield row.name, digest_of(row.from_file(stored.plain(row.name), self._shapes(row)))

    def _shapes(self, row: gguf_layout.GGUFTensor) -> list[tuple[int, ...]]:
        return [self._weights.shape(part) for part in row.tensor.names]


class _File:
    """The tensors of a file. gguf's reader maps the file into memory; here, one tensor is read at a time."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self._path = path
        self._entries = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
        self.bytes = sum(tensor.n_bytes for tensor in self._entries.values())

    def bytes_of(self, name: str) -> np.ndarray:
        """Return the stored bytes of a tensor."""
        entry = self._entries[name]
        return np.fromfile(self._path, np.uint8, int(entry.n_bytes), offset=int(entry.data_offset))

    def plain(self, name: str) -> Tensor:
        """Return a tensor of a type that PyTorch has."""
        entry = self._entries[name]
        shape = [int(size) for size in reversed(entry.shape)]  # gguf names the dims in reversed order
        return torch.from_numpy(self.bytes_of(name)).view(_DTYPES[entry.tensor_type.name]).view(shape)

    def dequantized(self, name: str) -> Tensor:
        """Return a tensor as fp32."""
        from gguf.quants import dequantize

        entry = self._entries[name]
        if entry.tensor_type.name in _DTYPES:
            return self.plain(name).float()
        data = self.bytes_of(name).reshape(entry.data.shape)
        return torch.from_numpy(dequantize(data, entry.tensor_type))


class FileWeights:
    """The weights of a file, dequantized, with the interface of a checkpoint.

    Args:
        weights: weights of the checkpoint, for their shapes.
    """

    def __init__(self, path: Path, weights: Weights, config: ModelConfig) -> None:
        self._weights, self._file = weights, _File(path)
        self._rows: dict[str, list[gguf_layout.GGUFTensor]] = {}
        for row in gguf_layout.rows(config):
            for name in row.tensor.names:
                self._rows.setdefault(name, []).append(row)
        self.bytes = self._file.bytes

    def names(self) -> list[str]:
        """Names of all weights."""
        return list(self._weights.names())

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a weight."""
        return self._weights.shape(name)

    def tensor(self, name: str) -> Tensor:
        """Return a full weight, fp32."""
        return functools.reduce(torch.add, (self._part(row, name) for row in self._rows[name]))

    def _part(self, row: gguf_layout.GGUFTensor, name: str) -> Tensor:
        """What a tensor of the file contains of a weight."""
        parts = row.from_file(self._file.dequantized(row.name), [self.shape(part) for part in row.tensor.names])
        return parts[row.tensor.names.index(name)]
