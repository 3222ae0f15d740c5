"""LoRA adapters of native checkpoints, and weights with an adapter merged into them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from pipeline.checkpoint.adapter_factors import Adapter, Factors
from pipeline.checkpoint.huggingface_export import Weights
from pipeline.checkpoint.peft_format import read_peft
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common.errors import UserError, Violation
from pipeline.config.lora import PARTS, LoraConfig, is_adapter, layer_of
from pipeline.layers.lora import merged
from pipeline.models import config_classes
from pipeline.models.config import ModelConfig


class MergedWeights:
    """The weights of a checkpoint with an adapter merged into them; for other uses it is the checkpoint.

    Args:
        checkpoint: the checkpoint; its own adapter, if it has one, is merged.
        adapter: another adapter to merge.
    """

    def __init__(self, checkpoint: Checkpoint, adapter: Adapter | None = None) -> None:
        self.checkpoint, self.path, self.config, self.step = checkpoint, checkpoint.path, checkpoint.config, checkpoint.step
        self.train_state = checkpoint.train_state
        own = of_checkpoint(checkpoint)
        self._adapters = [each.layers for each in (own, adapter) if each is not None]
        self._saved = {} if adapter is None else adapter.saved

    def names(self) -> list[str]:
        """Names of all weights, without those of adapters."""
        return [name for name in self.checkpoint.names() if not is_adapter(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a weight."""
        return self.checkpoint.shape(name)

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """Return a full weight, or one of its moments; errors as in Checkpoint.tensor."""
        if kind == "weight" and name in self._saved:
            return self._saved[name]
        value = self.checkpoint.tensor(name, kind)
        for layers in self._adapters if kind == "weight" else ():
            if (factors := layers.get(name.removesuffix(".weight"))) is not None and name.endswith(".weight"):
                value = merged(value.float(), factors.a, factors.b, factors.scale)
        return value

    def fragment(self, rank: int, name: str, geometry: dict[str, Any], kind: str) -> Tensor | None:
        """As Checkpoint.fragment; None for a weight that an adapter changes."""
        if name in self._saved or any(name.removesuffix(".weight") in layers for layers in self._adapters):
            return None
        return self.checkpoint.fragment(rank, name, geometry, kind)


def open_merged(path: Path, folder: str | None) -> MergedWeights:
    """Open a checkpoint with an adapter merged into its weights.

    Args:
        path: the checkpoint.
        folder: an adapter in PEFT's format (stage.adapter), None for none.

    Raises:
        UserError: the adapter is of another base, or cannot be read; or as Checkpoint.
    """
    checkpoint = Checkpoint(path)
    if folder is None:
        return MergedWeights(checkpoint)
    model = config_classes.from_dict(checkpoint.config["model"])
    adapter = read_peft(Path(folder), model, "stage.adapter")
    check_base(adapter, MergedWeights(checkpoint), model, "stage.adapter")
    return MergedWeights(checkpoint, adapter)


def lora_of(config: Mapping[str, Any]) -> LoraConfig:
    """Return the LoRA settings of a checkpoint's configuration."""
    return LoraConfig(**config.get("lora", {}))


class _Layers(Mapping[str, Factors]):
    """The adapters of a checkpoint, read when they are used."""

    def __init__(self, checkpoint: Checkpoint, names: list[str]) -> None:
        self._checkpoint, self._names, self._lora = checkpoint, names, lora_of(checkpoint.config)

    def __getitem__(self, layer: str) -> Factors:
        if layer not in self._names:
            raise KeyError(layer)
        a, b = (self._checkpoint.tensor(layer + part).float() for part in PARTS)
        return Factors(a, b, self._lora.alpha_of(layer))

    def __contains__(self, layer: object) -> bool:
        return layer in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def of_checkpoint(checkpoint: Checkpoint) -> Adapter | None:
    """Return the adapter that a run has trained, None if it has trained none."""
    names = sorted({layer_of(name) for name in checkpoint.names() if is_adapter(name)})
    return Adapter(_Layers(checkpoint, names), "", checkpoint.path) if names else None


def saved_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the weights that a run has trained beside its adapter, fp32."""
    lora = lora_of(checkpoint.config)
    return {name: checkpoint.tensor(name).float() for name in checkpoint.names() if lora.saves(name)}


def base_hash(weights: Weights, config: ModelConfig, without: Collection[str] = ()) -> str:
    """Return a hash of a model's weights without adapters, rounded to bf16, and of its configuration. It reads all weights.

    Args:
        weights: of the model.
        config: its configuration.
        without: names of weights that are not included: those that were trained beside the adapter.
    """
    defaults = type(config)()
    sizes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    changed = {name: value for name, value in sizes.items() if value != getattr(defaults, name)}
    state = xxhash.xxh3_128(json.dumps([config.family, changed], sort_keys=True).encode())
    for name in sorted(name for name in weights.names() if not is_adapter(name) and name not in without):
        state.update(name.encode())
        state.update(weights.tensor(name).to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes())
    return state.hexdigest()


def check_base(adapter: Adapter, weights: Weights, config: ModelConfig, key: str) -> None:
    """Refuse an adapter of another base: by the hash that the adapter records, else by the shapes of its layers.

    Raises:
        UserError: with one violation for each layer that does not fit.
    """
    fix = "use the checkpoint that the adapter was trained with"
    names = set(weights.names())
    found = []
    for layer, factors in adapter.layers.items():
        shape = (factors.b.shape[0], factors.a.shape[1])
        ours = tuple(weights.shape(f"{layer}.weight")) if f"{layer}.weight" in names else None
        if shape != ours:
            rule = f"adapts {layer} of shape {list(shape)}; that of the model is {'missing' if ours is None else list(ours)}"
            found.append(Violation(key, adapter.path, rule, fix))
    for name, value in adapter.saved.items():
        if name not in names or tuple(weights.shape(name)) != tuple(value.shape):
            found.append(Violation(key, adapter.path, f"has {name} of shape {list(value.shape)}; that of the model is another one", fix))
    if not found and adapter.base and adapter.base != base_hash(weights, config, adapter.saved):
        found.append(Violation(key, adapter.path, "was trained with another base: its hash of the weights and configuration differs", fix))
    if found:
        raise UserError(found)
