"""Full weights from a native checkpoint: no GPU, no process group, one tensor in memory at a time."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.checkpoint.consolidate import paste
from pipeline.checkpoint.native import file_name, find, piece_of, read_index, tensor_key
from pipeline.errors import UserError
from pipeline.files import verify

__all__ = ["Checkpoint", "find"]

_REMEDY = "remove the checkpoint's folder; checkpoint.resume=auto then continues from the one before"


class Checkpoint:
    """A checkpoint on disk. A file is held against its checksum when it is first read.

    Attributes:
        path: the folder.
        config: the configuration it was made with, as nested dictionaries.
        train_state: how far the run was.
        data: fingerprint of the token shards.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        index = read_index(path)
        self.config, self.train_state, self.data, self._files = index.config, index.train_state, index.data, index.files
        self._kinds = index.kinds
        self._open: dict[str, Any] = {}
        self._headers: dict[str, dict[str, dict[str, Any]]] = {}
        self._verified: set[str] = set()

    @property
    def step(self) -> int:
        """Steps the run had done."""
        return self.train_state.step

    def names(self) -> list[str]:
        """The weights; a head tied to the embedding has no entry of its own."""
        return sorted(self._fragments)

    def shape(self, name: str) -> tuple[int, ...]:
        """The full shape of a weight."""
        return piece_of(name, self._fragments[name][0][1])[0].full_shape

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """A full weight, or one of its moments, put together from all ranks' fragments.

        Args:
            name: of the weight.
            kind: weight, exp_avg or exp_avg_sq.

        Raises:
            UserError: a file is missing or corrupt, or the fragments leave a gap.
        """
        full = torch.empty(self.shape(name), dtype=torch.float32)
        filled = 0
        for file, geometry in self._fragments[name]:
            piece, start, count = piece_of(name, geometry)
            paste(full, piece, start, self._read(file, kind, name))
            filled += count
        if filled != full.numel():
            raise UserError.of("checkpoint", self.path, f"{name}: {filled} of {full.numel()} elements are there", "use an older checkpoint")
        return full

    def fragment(self, rank: int, name: str, geometry: dict[str, Any], kind: str) -> Tensor | None:
        """A fragment as a rank wrote it, None if that rank's fragment of the weight is another one."""
        file = file_name(rank)
        if file not in self._files or self._geometries(file).get(name) != geometry:
            return None
        return self._read(file, kind, name)

    @cached_property
    def _fragments(self) -> dict[str, list[tuple[str, dict[str, Any]]]]:
        """Weight -> its fragments, each (file, geometry), from all files' headers."""
        found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        for file in sorted(self._files):
            for name, geometry in self._geometries(file).items():
                found.setdefault(name, []).append((file, geometry))
        return found

    def _geometries(self, file: str) -> dict[str, dict[str, Any]]:
        """Weight -> where the file's fragment of it belongs, from the file's header alone."""
        if file not in self._headers:
            try:
                self._open[file] = safe_open(self.path / file, framework="pt", device="cpu")
                self._headers[file] = json.loads(self._open[file].metadata()["fragments"])
            except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
                self._verify(file)  # says more, where it can
                raise UserError.of("checkpoint", self.path / file, f"is not readable: {error}", _REMEDY) from error
        return self._headers[file]

    def _read(self, file: str, kind: str, name: str) -> Tensor:
        """A fragment's elements, after the file was held against its checksum once. Moments that no file holds are zero."""
        self._verify(file)
        geometry = self._geometries(file)[name]
        if kind not in self._kinds:
            return torch.zeros(geometry["run"][1])
        tensor: Tensor = self._open[file].get_tensor(tensor_key(kind, name))
        return tensor

    def _verify(self, file: str) -> None:
        if file not in self._verified:
            verify(self.path / file, self._files[file]["bytes"], self._files[file]["xxh3"], _REMEDY)
            self._verified.add(file)
