"""LoRA adapters: their values, read from a native checkpoint, and the base model that each belongs to."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from pipeline.checkpoint.reader import Checkpoint
from pipeline.checkpoint.weights import Weights
from pipeline.common.errors import UserError, Violation
from pipeline.config.lora import FACTORS, LoraConfig, factor_of, is_adapter, layer_of
from pipeline.models.config import ModelConfig


@dataclass(frozen=True)
class Factors:
    """The adapter of a linear layer: b @ a * alpha / rank is added to its weight; a is (rank, input), b (output, rank), both fp32.

    Of a matrix of routed experts, both are stacked along a first dim.
    """

    a: Tensor
    b: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        """Rows of a."""
        return self.a.shape[-2]

    @property
    def scale(self) -> float:
        """Factor of the product."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class Adapter:
    """An adapter of a model.

    Attributes:
        layers: name of a linear layer, or of a matrix of experts -> its factors.
        base: base_hash of the weights that it was trained with; empty if that is not known.
        path: where it was read from.
        saved: name of a weight that was trained beside the adapter (lora.modules_to_save) -> its full value.
    """

    layers: Mapping[str, Factors]
    base: str
    path: Path
    saved: Mapping[str, Tensor] = field(default_factory=dict)


def lora_of(config: Mapping[str, Any]) -> LoraConfig:
    """Return the LoRA settings of a checkpoint's configuration."""
    return LoraConfig(**config.get("lora", {}))


class _Layers(Mapping[str, Factors]):
    """The adapters of a checkpoint, read when they are used."""

    def __init__(self, checkpoint: Checkpoint, names: dict[str, dict[str, str]]) -> None:
        self._checkpoint, self._names, self._lora = checkpoint, names, lora_of(checkpoint.config)

    def __getitem__(self, layer: str) -> Factors:
        if layer not in self._names:
            raise KeyError(layer)
        a, b = (self._checkpoint.tensor(self._names[layer][factor]).float() for factor in FACTORS)
        return Factors(a, b, self._lora.alpha_of(layer))

    def __contains__(self, layer: object) -> bool:
        return layer in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def adapter_of(checkpoint: Checkpoint) -> Adapter | None:
    """Return the adapter that a run has trained, None if it has trained none."""
    names: dict[str, dict[str, str]] = {}
    for name in sorted(filter(is_adapter, checkpoint.names())):
        names.setdefault(layer_of(name), {})[factor_of(name)] = name
    return Adapter(_Layers(checkpoint, names), "", checkpoint.path) if names else None


def base_hash(weights: Weights, config: ModelConfig, without: Collection[str] = ()) -> str:
    """Return a hash of a model's weights without adapters, rounded to bf16, and of its configuration. It reads all weights.

    Args:
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
    violations = []
    for layer, factors in adapter.layers.items():
        shape = (*factors.b.shape[:-1], factors.a.shape[-1])
        base_name = next((name for name in (f"{layer}.weight", layer) if name in names), None)
        ours = None if base_name is None else tuple(weights.shape(base_name))
        if shape != ours:
            rule = f"adapts {layer} of shape {list(shape)}; that of the model is {'missing' if ours is None else list(ours)}"
            violations.append(Violation(key, adapter.path, rule, fix))
    for name, value in adapter.saved.items():
        if name not in names or tuple(weights.shape(name)) != tuple(value.shape):
            violations.append(
                Violation(key, adapter.path, f"has {name} of shape {list(value.shape)}; that of the model is another one", fix)
            )
    if not violations and adapter.base and adapter.base != base_hash(weights, config, adapter.saved):
        violations.append(
            Violation(key, adapter.path, "was trained with another base: its hash of the weights and configuration differs", fix)
        )
    UserError.raise_for(violations)
