"""Quantized layers in a folder, one file each: what GPTQ has chosen, until the export is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors.torch import load, save_file

from pipeline.layers.uniform_quantization import Quantized


class SolvedLayers(Mapping[str, Quantized]):
    """Name of a layer -> its quantized weight, read from the file when it is wanted.

    Args:
        folder: for the files; it may exist.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._names: dict[str, None] = {}

    def add(self, layer: str, weight: Quantized) -> None:
        """Write a layer."""
        parts = {"codes": weight.codes, "scale": weight.scale, "zero_point": weight.zero_point}
        save_file({name: part.contiguous() for name, part in parts.items()}, self._path(layer))
        self._names[layer] = None

    def __getitem__(self, layer: str) -> Quantized:
        """Read a layer."""
        if layer not in self._names:
            raise KeyError(layer)
        return Quantized(**load(self._path(layer).read_bytes()))

    def __contains__(self, layer: object) -> bool:
        """Whether a layer was written."""
        return layer in self._names

    def __iter__(self) -> Iterator[str]:
        """Names in the order in which they were written."""
        return iter(self._names)

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._names)

    def _path(self, layer: str) -> Path:
        return self._folder / f"{layer}.safetensors"
