"""The tensors of a GPT-NeoX checkpoint: a file a layer and tensor-parallel rank, or one a tensor-parallel rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped] # PyYAML has no types

from pipeline.common.errors import UserError, Violation
from pipeline.conversion import safe_pickle
from pipeline.conversion.foreign_weights import RankFiles

_LAYER = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
_RANK = re.compile(r"mp_rank_(\d+)_model_states\.pt")
_SEQUENTIAL = re.compile(r"sequential\.(\d+)\.(.+)")
_FIX = "copy the whole folder of the checkpoint"
#: Layers before the first block: the embedding, and a function.
_BEFORE = 2


def is_neox(step: Path) -> bool:
    """Whether a folder that DeepSpeed wrote is GPT-NeoX's, with or without pipeline parallelism."""
    if any(_LAYER.fullmatch(path.name) for path in step.iterdir()):
        return True
    first = step / "mp_rank_00_model_states.pt"
    module = safe_pickle.load(first).get("module") if first.is_file() else None
    return isinstance(module, dict) and any(_SEQUENTIAL.match(name) for name in module)


class NeoxFolder(RankFiles):
    """The tensors of a step. Blocks are named `layers.N`.

    Attributes:
        settings: the settings of the training that the folder has, with underscores.
    """

    def __init__(self, folder: Path) -> None:
        """Open the files; tensors are mapped.

        Raises:
            UserError: files are missing or damaged.
        """
        super().__init__(folder)
        self.settings = _settings(folder)
        layered = sorted((int(m[1]), int(m[2]), path) for path in folder.iterdir() if (m := _LAYER.fullmatch(path.name)))
        if layered:
            _check_grid({(layer, rank) for layer, rank, _ in layered}, int(self.settings.get("model_parallel_size") or 0), folder)
            content = [(layer, name, value, path) for layer, _, path in layered for name, value in safe_pickle.load(path).items()]
        else:
            content = [item for path in sorted(folder.glob("mp_rank_*_model_states.pt")) for item in _sequential(path)]
            self._check_ranks(folder)
        self._files = sorted({path for *_, path in content})
        blocks = sorted({layer for layer, name, *_ in content if name.startswith("attention.")})
        self.layers = len(blocks)
        expected = int(self.settings.get("num_layers") or self.layers)
        if blocks != [*range(_BEFORE, _BEFORE + expected)]:
            missing = sorted({*range(_BEFORE, _BEFORE + expected)} - {*blocks})
            raise UserError.of("stage.input", folder, f"has {len(blocks)} of {expected} blocks; layers {missing} are missing", _FIX)
        for layer, name, value, path in content:
            if torch.is_tensor(value):
                inside = layer in blocks
                self._shards[f"layers.{layer - _BEFORE}.{name}" if inside else name].append((value.detach(), path))

    def _check_ranks(self, folder: Path) -> None:
        ranks = sorted(int(match[1]) for path in folder.iterdir() if (match := _RANK.fullmatch(path.name)))
        wanted = range(int(self.settings.get("model_parallel_size") or ranks[-1] + 1))
        missing = [folder / f"mp_rank_{rank:02d}_model_states.pt" for rank in wanted if rank not in ranks]
        UserError.raise_for(Violation("stage.input", path, "is missing", _FIX) for path in missing)

    def files(self) -> list[Path]:
        """All files that are read."""
        return self._files


def _sequential(path: Path) -> list[tuple[int, str, Any, Path]]:
    """Return (layer, name in the layer, value, file) of a file of a tensor-parallel rank."""
    module = safe_pickle.load(path).get("module")
    if not isinstance(module, dict):
        raise UserError.of("stage.input", path, "has no entry module", _FIX)
    return [(int(match[1]), match[2], value, path) for name, value in module.items() if (match := _SEQUENTIAL.fullmatch(name))]


def _check_grid(present: set[tuple[int, int]], ranks: int, folder: Path) -> None:
    """Refuse layers of which a rank's file is missing."""
    ranks = max(ranks, 1 + max(rank for _, rank in present))
    paths = {(layer, rank): folder / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt" for layer, _ in present for rank in range(ranks)}
    missing = [path for place, path in sorted(paths.items()) if place not in present]
    UserError.raise_for(Violation("stage.input", path, "is missing", _FIX) for path in missing)


def _settings(folder: Path) -> dict[str, Any]:
    """Return the settings: those of configs/*.yml that GPT-NeoX copies into the folder, and those of the training that the files have."""
    values: dict[str, Any] = {}
    for path in sorted([*(folder / "configs").glob("*.yml"), *(folder / "configs").glob("*.yaml")]):
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UserError.of("stage.input", path, f"is not readable: {error}", _FIX) from error
        values.update({key.replace("-", "_"): value for key, value in (content if isinstance(content, dict) else {}).items()})
    first = folder / "mp_rank_00_model_states.pt"
    if first.is_file():
        stored = safe_pickle.load(first).get("args")
        values.update(stored if isinstance(stored, dict) else {})
    return values
