"""Reads full weights from a native checkpoint, without a GPU or a process group, one tensor in memory at a time."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.checkpoint.fragments import consolidate_fragments
from pipeline.checkpoint.native import find, piece_of, read_index, tensor_key
from pipeline.common.atomic_files import verify
from pipeline.common.errors import UserError

__all__ = ["Checkpoint", "find"]

_REMEDY = "remove the checkpoint folder, or set checkpoint.skip_damaged=true: checkpoint.resume=auto then continues from the previous one"


class Checkpoint:
    """A checkpoint on disk. A file is verified against its checksum when it is first read.

    Attributes:
        path: the checkpoint folder.
        config: the configuration of the run that wrote it, as nested dictionaries.
        train_state: step, samples and updates of that run.
        data: fingerprint of the token shards.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        index = read_index(path)
        self.config, self.train_state, self.data, self._files = (
            index.config,
            index.train_state,
            index.data,
            {file.name: file for file in index.files},
        )
        self._kinds = index.kinds
        self._open: dict[str, Any] = {}
        self._headers: dict[str, dict[str, dict[str, Any]]] = {}
        self._keys: dict[str, set[str]] = {}
        self._verified: set[str] = set()

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self.train_state.step

    def names(self) -> list[str]:
        """Names of all weights; a head tied to the embedding has no entry."""
        return sorted(self._fragments)

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a weight."""
        return piece_of(name, self._fragments[name][0][1])[0].full_shape

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """Return a full weight, or one of its moments, consolidated from the fragments of all ranks.

        Args:
            name: of the weight.
            kind: weight, exp_avg or exp_avg_sq.

        Raises:
            UserError: a file is missing or corrupt, or fragments are missing.
        """
        pieces = ((file, *piece_of(name, geometry)) for file, geometry in self._fragments[name])
        fragments = ((piece, start, self._read(file, kind, name)) for file, piece, start, _ in pieces)
        full, written = consolidate_fragments(self.shape(name), fragments)
        if written != full.numel():
            rule = f"{name}: has {written} of {full.numel()} elements"
            raise UserError.of("checkpoint", self.path, rule, "use an older checkpoint")
        return full

    def has(self, name: str, kind: str) -> bool:
        """Whether the checkpoint has tensors of a kind for a weight; moments that it does not have are zero."""
        return kind in self._kinds and any(tensor_key(kind, name) in self._keys[file] for file, _ in self._fragments[name])

    def fragment(self, rank: int, name: str, geometry: dict[str, Any], kind: str) -> Tensor | None:
        """Return a fragment as a rank wrote it; None if that rank wrote another fragment of the weight, or none."""
        file = f"rank-{rank:05d}.safetensors"
        if file not in self._files or self._geometries(file).get(name) != geometry:
            return None
        return self._read(file, kind, name)

    @cached_property
    def _fragments(self) -> dict[str, list[tuple[str, dict[str, Any]]]]:
        """Weight -> its fragments, each (file, geometry), from the headers of all files."""
        fragments: dict[str, list[tuple[str, dict[str, Any]]]] = {}
        for file in sorted(self._files):
            for name, geometry in self._geometries(file).items():
                fragments.setdefault(name, []).append((file, geometry))
        return fragments

    def _geometries(self, file: str) -> dict[str, dict[str, Any]]:
        """Weight -> geometry of the file's fragment of it, from the header of the file."""
        if file not in self._headers:
            try:
                self._open[file] = safe_open(self.path / file, framework="pt", device="cpu")
                self._keys[file] = set(self._open[file].keys())
                self._headers[file] = json.loads(self._open[file].metadata()["fragments"])
            except (SafetensorError, OSError, TypeError, KeyError, ValueError) as error:
                self._verify(file)  # raises a more specific error if length or checksum differ
                raise UserError.of("checkpoint", self.path / file, f"is not readable: {error}", _REMEDY) from error
        return self._headers[file]

    def _read(self, file: str, kind: str, name: str) -> Tensor:
        """Return the elements of a fragment; the file is verified at the first read. Moments that the checkpoint does not have are zero."""
        self._verify(file)
        geometry = self._geometries(file)[name]
        if kind not in self._kinds or tensor_key(kind, name) not in self._keys[file]:
            return torch.zeros(geometry["run"][1])
        tensor: Tensor = self._open[file].get_tensor(tensor_key(kind, name))
        return tensor

    def _verify(self, file: str) -> None:
        if file not in self._verified:
            verify(self.path / file, self._files[file].bytes, self._files[file].xxh3, _REMEDY)
            self._verified.add(file)
