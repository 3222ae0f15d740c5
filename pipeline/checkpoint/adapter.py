"""LoRA adapters: those of a native checkpoint, those of a folder in PEFT's format, and weights with an adapter merged into them."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.checkpoint.huggingface_export import Weights
from pipeline.checkpoint.reader import Checkpoint
from pipeline.config.lora import PARTS, LoraConfig, is_adapter, layer_of
from pipeline.errors import UserError, Violation
from pipeline.files import apply_umask
from pipeline.layers.lora import linear_layers, merged
from pipeline.models import families, registry
from pipeline.models.config import ModelConfig
from pipeline.models.rows import Row

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: What precedes the name of a module in a PEFT file.
_PREFIX = "base_model.model."
#: Keys of adapter_config.json that change what an adapter computes -> the values that are supported.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
}


@dataclass(frozen=True)
class Factors:
    """The adapter of a linear layer: b @ a * alpha / rank is added to its weight; a is (rank, input), b (output, rank), both fp32."""

    a: Tensor
    b: Tensor
    alpha: float

    @property
    def rank(self) -> int:
        """Rows of a."""
        return self.a.shape[0]

    @property
    def scale(self) -> float:
        """Factor of the product."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class Adapter:
    """An adapter of a model.

    Attributes:
        layers: name of a linear layer -> its factors.
        base: base_hash of the weights that it was trained with; empty if that is not known.
        path: where it was read from.
    """

    layers: Mapping[str, Factors]
    base: str
    path: Path


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

    def names(self) -> list[str]:
        """Names of all weights, without those of adapters."""
        return [name for name in self.checkpoint.names() if not is_adapter(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a weight."""
        return self.checkpoint.shape(name)

    def tensor(self, name: str, kind: str = "weight") -> Tensor:
        """Return a full weight, or one of its moments; errors as in Checkpoint.tensor."""
        value = self.checkpoint.tensor(name, kind)
        for layers in self._adapters if kind == "weight" else ():
            if (factors := layers.get(name.removesuffix(".weight"))) is not None and name.endswith(".weight"):
                value = merged(value.float(), factors.a, factors.b, factors.scale)
        return value

    def fragment(self, rank: int, name: str, geometry: dict[str, Any], kind: str) -> Tensor | None:
        """As Checkpoint.fragment; None for a weight with an adapter."""
        if any(name.removesuffix(".weight") in layers for layers in self._adapters):
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
    model = families.from_dict(checkpoint.config["model"])
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


def base_hash(weights: Weights, config: ModelConfig) -> str:
    """Return a hash of a model's weights without adapters, rounded to bf16, and of its configuration. It reads all weights."""
    defaults = type(config)()
    sizes = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    changed = {name: value for name, value in sizes.items() if value != getattr(defaults, name)}
    state = xxhash.xxh3_128(json.dumps([config.family, changed], sort_keys=True).encode())
    for name in sorted(name for name in weights.names() if not is_adapter(name)):
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
    if not found and adapter.base and adapter.base != base_hash(weights, config):
        found.append(Violation(key, adapter.path, "was trained with another base: its hash of the weights and configuration differs", fix))
    if found:
        raise UserError(found)


def read_peft(folder: Path, config: ModelConfig, key: str) -> Adapter:
    """Read an adapter in PEFT's format.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        config: the configuration of the base model.
        key: the configuration key that names the folder.

    Raises:
        UserError: a file is missing or not readable, or the adapter is of another kind or adapts layers that the model does not have.
    """
    settings, tensors, metadata = _read_files(folder, key)
    wrong = [(name, settings.get(name)) for name, values in _SUPPORTED.items() if name in settings and settings[name] not in values]
    if wrong:
        rules = (f"has {name}={json.dumps(value)}, which is not supported" for name, value in wrong)
        raise UserError([Violation(key, folder, rule, "use a LoRA adapter of linear layers") for rule in rules])
    rows = {_module(row): (row, outputs) for row, outputs in _linear_rows(config)}
    layers: dict[str, Factors] = {}
    unknown = []
    for module in dict.fromkeys(name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in tensors):
        try:
            a, b = (tensors[f"{_PREFIX}{module}.lora_{part}.weight"].float() for part in "AB")
        except KeyError:
            unknown.append(module)
            continue
        if module not in rows:
            unknown.append(module)
            continue
        alpha = _matching(settings.get("alpha_pattern") or {}, module, settings.get("lora_alpha", 8))
        alpha = alpha * math.sqrt(a.shape[0]) if settings.get("use_rslora") else alpha  # alpha / sqrt(rank) instead of alpha / rank
        row, outputs = rows[module]
        for name, part in zip(row.names, _split(row, b, outputs), strict=True):
            layers[name.removesuffix(".weight")] = Factors(a, part.contiguous(), alpha)
    if unknown:
        rule = f"adapts {', '.join(unknown[:5])}, which is not a linear layer of model.family={config.family}"
        raise UserError.of(key, folder, rule, "use an adapter of this model, without adapters of other tensors")
    return Adapter(layers, metadata.get("base", ""), folder)


def configure(lora: LoraConfig, adapter: Adapter) -> None:
    """Set rank, alpha and targets of a run to those of an adapter."""
    ranks = {layer: factors.rank for layer, factors in adapter.layers.items()}
    alphas = {layer: factors.alpha for layer, factors in adapter.layers.items()}
    lora.rank, lora.alpha, lora.targets = _commonest(ranks.values()), _commonest(alphas.values()), list(ranks)
    lora.rank_pattern = {layer: rank for layer, rank in ranks.items() if rank != lora.rank}
    lora.alpha_pattern = {layer: alpha for layer, alpha in alphas.items() if alpha != lora.alpha}


def _commonest(values: Iterable[Any]) -> Any:
    """The value that occurs most often."""
    return Counter(values).most_common(1)[0][0]


def _read_files(folder: Path, key: str) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, str]]:
    """Return the settings, the tensors and the metadata of an adapter."""
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        with safe_open(folder / WEIGHTS, framework="pt", device="cpu") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - the file is not a dict
            return settings, tensors, opened.metadata() or {}
    except (OSError, ValueError, SafetensorError) as error:
        rule = f"has no readable {CONFIG} and {WEIGHTS}: {error}"
        raise UserError.of(
            key, folder, rule, "set it to a folder that stage=convert stage.format=peft or PEFT's save_pretrained wrote"
        ) from error


def write_peft(folder: Path, adapter: Adapter, config: ModelConfig, *, dropout: float, base_name: str) -> int:
    """Write an adapter in PEFT's format.

    A stock module that holds several of our layers (GPT-2's c_attn) gets one adapter with the ranks of all of them: its a is their a's, one
    below the other, and its b is block-diagonal.

    Args:
        folder: existing output folder.
        adapter: the adapter; its `base` is recorded.
        config: the configuration of the base model.
        dropout: the dropout rate of its training.
        base_name: recorded as base_model_name_or_path.

    Returns:
        Number of parameters written.
    """
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    rows = _linear_rows(config)
    for row, outputs in rows:
        parts = [adapter.layers.get(name.removesuffix(".weight")) for name in row.names]
        if (joined := _join(row, parts, outputs)) is not None:
            module = _module(row)
            tensors[f"{_PREFIX}{module}.lora_A.weight"], tensors[f"{_PREFIX}{module}.lora_B.weight"] = joined.a, joined.b
            ranks[module], alphas[module] = joined.rank, joined.alpha
    rank, alpha = _commonest(ranks.values()), _commonest(alphas.values())
    transposed = {row.transposed for row, _ in rows if _module(row) in ranks}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": _targets(ranks, map(_module, registry.stock_rows(config)[0])),
        "rank_pattern": {re.escape(module): value for module, value in ranks.items() if value != rank},
        "alpha_pattern": {re.escape(module): value for module, value in alphas.items() if value != alpha},
        "fan_in_fan_out": transposed == {True},
        "bias": "none",
        "inference_mode": True,
    }
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt", "base": adapter.base})
    apply_umask(folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return sum(tensor.numel() for tensor in tensors.values())


def _linear_rows(config: ModelConfig) -> list[tuple[Row, list[int]]]:
    """The rows of the stock model's linear layers, each with the outputs of our layers in it."""
    with torch.device("meta"):
        outputs = {f"{name}.weight": layer.out_features for name, layer in linear_layers(registry.build(config))}
    rows = (row for row in registry.stock_rows(config)[0] if row.names and outputs.keys() >= set(row.names))
    return [(row, [outputs[name] for name in row.names]) for row in rows]


def _module(row: Row) -> str:
    """The stock module of a row."""
    return row.hf_name.removesuffix(".weight")


def _split(row: Row, b: Tensor, outputs: list[int]) -> list[Tensor]:
    """The part of b of each of our layers in a row. Stock layers that store transposed weights do not transpose b."""
    return replace(row, transposed=False).from_hf(b, [(count, b.shape[1]) for count in outputs])


def _join(row: Row, parts: list[Factors | None], outputs: list[int]) -> Factors | None:
    """The adapter of a row, from those of its layers, some of which may have none; None if all of them have none."""
    present = [part for part in parts if part is not None]
    if len(parts) == 1 or not present:
        return parts[0]
    rank, alpha = sum(part.rank for part in present), max(part.alpha for part in present)
    blocks, start = [], 0
    for part, count in zip(parts, outputs, strict=True):
        block = torch.zeros(count, rank)
        if part is not None:
            block[:, start : start + part.rank] = part.b * (part.scale * rank / alpha)
            start += part.rank
        blocks.append(block)
    return Factors(torch.cat([part.a for part in present]), replace(row, transposed=False).to_hf(blocks), alpha)


def _targets(modules: Iterable[str], known: Iterable[str]) -> list[str]:
    """The target_modules that select these modules: their last names, or if other modules have the same ones, the full names."""
    chosen = list(modules)
    leaves = list(dict.fromkeys(module.rpartition(".")[2] for module in chosen))
    return leaves if {name for name in known if name.rpartition(".")[2] in leaves} == set(chosen) else chosen


def _matching(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name, as PEFT matches them."""
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)), default)
