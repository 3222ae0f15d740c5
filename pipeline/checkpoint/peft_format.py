"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeline.checkpoint import peft_settings
from pipeline.checkpoint.lora_adapter import Adapter, Factors
from pipeline.common.atomic_files import apply_umask
from pipeline.common.errors import UserError
from pipeline.config.lora import LoraConfig
from pipeline.layers.lora import linear_layers
from pipeline.models import registry
from pipeline.models.config import ModelConfig
from pipeline.models.stock_tensors import StockTensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: What precedes the name of a module in a PEFT file.
_PREFIX = "base_model.model."
#: Our embedding, and the stock output head that is tied to it.
_EMBEDDING, _TIED_HEAD = "embed.tokens.weight", "lm_head.weight"


def read_peft(folder: Path, config: ModelConfig, key: str) -> Adapter:
    """Read an adapter in PEFT's format.

    Args:
        key: the configuration key that names the folder.

    Raises:
        UserError: a file is missing or not readable, or the adapter is of another kind or adapts layers that the model does not have.
    """
    settings, tensors, metadata = _read_files(folder, key)
    peft_settings.check(settings, folder, key)
    if others := sorted(name for name in tensors if ".lora_" in name and not name.endswith((".lora_A.weight", ".lora_B.weight"))):
        rule = f"has {', '.join(others[:5])}, which is no factor of a linear layer"
        raise UserError.of(key, folder, rule, "use an adapter of linear layers, or merge it in PEFT and import the model")
    entries = {_module(entry): (entry, outputs) for entry, outputs in _linear_entries(config)}
    layers: dict[str, Factors] = {}
    unknown = []
    for module in dict.fromkeys(name.removeprefix(_PREFIX).rpartition(".lora_")[0] for name in tensors if ".lora_" in name):
        try:
            a, b = (tensors[f"{_PREFIX}{module}.lora_{part}.weight"].float() for part in "AB")
        except KeyError:
            unknown.append(module)
            continue
        if module not in entries:
            unknown.append(module)
            continue
        alpha = _matching(settings.get("alpha_pattern") or {}, module, settings.get("lora_alpha", 8))
        alpha = alpha * math.sqrt(a.shape[0]) if settings.get("use_rslora") else alpha  # alpha / sqrt(rank) instead of alpha / rank
        entry, outputs = entries[module]
        for name, part in zip(entry.names, _split(entry, b, outputs), strict=True):
            layers[name.removesuffix(".weight")] = Factors(a, part.contiguous(), alpha)
    if unknown:
        rule = f"adapts {', '.join(unknown[:5])}, which is not a linear layer of model.family={config.family}"
        raise UserError.of(key, folder, rule, "use an adapter of this model, without adapters of other tensors")
    saved = {name.removeprefix(_PREFIX): value.float() for name, value in tensors.items() if ".lora_" not in name}
    return Adapter(layers, metadata.get("base", ""), folder, _read_saved(saved, settings, config, folder, key))


def _read_saved(tensors: dict[str, Tensor], settings: Mapping[str, Any], config: ModelConfig, folder: Path, key: str) -> dict[str, Tensor]:
    """Return our weights of the modules that were trained beside an adapter.

    Args:
        tensors: by their stock names.
        settings: of the adapter; modules_to_save has the ends of the names of these modules.
        config, folder, key: as in read_peft.
    """
    modules = settings.get("modules_to_save") or []
    if not tensors and not modules:
        return {}
    with torch.device("meta"):
        shapes = {name: tuple(weight.shape) for name, weight in registry.build(config).state_dict().items()}
    entries = {entry.hf_name: entry for entry in registry.stock_tensors(config)[0]}
    if _TIED_HEAD in tensors and _is_tied(config):
        head = tensors.pop(_TIED_HEAD)
        if not any(entries[name].names == (_EMBEDDING,) and torch.equal(value, head) for name, value in tensors.items() if name in entries):
            rule = "has an output head of its own, and that of the model is its embedding"
            raise UserError.of(key, folder, rule, "use an adapter that was trained with ensure_weight_tying")
    elif (
        _is_tied(config)
        and any(entries[name].names == (_EMBEDDING,) for name in entries.keys() & tensors)
        and not settings.get("ensure_weight_tying")
    ):
        rule = "trains the embedding without the output head, which is the same weight of the model (PEFT keeps the head as it was)"
        raise UserError.of(key, folder, rule, "use an adapter that was trained with ensure_weight_tying")
    unknown = [name for name in tensors if name not in entries]
    unknown += [module for module in modules if not any(name.rpartition(".")[0].endswith(module) for name in tensors)]
    if unknown:
        rule = f"trains {', '.join(unknown[:5])}, which is not a module of model.family={config.family} with its weights in the adapter"
        raise UserError.of(key, folder, rule, "use an adapter of this model")
    saved: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        try:
            parts = entries[name].from_hf(tensor, [shapes[ours] for ours in entries[name].names])
        except RuntimeError as error:
            raise UserError.of(key, folder, f"has {name} of shape {list(tensor.shape)}: {error}", "use an adapter of this model") from error
        saved |= {ours: part.contiguous() for ours, part in zip(entries[name].names, parts, strict=True)}
    return saved


def configured(lora: LoraConfig, adapter: Adapter) -> LoraConfig:
    """Return the settings of a run with rank, alpha and targets of an adapter."""
    ranks = {layer: factors.rank for layer, factors in adapter.layers.items()}
    alphas = {layer: factors.alpha for layer, factors in adapter.layers.items()}
    commonest, alpha = _commonest(ranks.values()), _commonest(alphas.values())
    return replace(
        lora,
        rank=commonest,
        alpha=alpha,
        targets=list(ranks),
        rank_pattern={layer: rank for layer, rank in ranks.items() if rank != commonest},
        alpha_pattern={layer: value for layer, value in alphas.items() if value != alpha},
        modules_to_save=sorted({name.rpartition(".")[0] for name in adapter.saved}),
    )


def _commonest(values: Iterable[Any]) -> Any:
    """The value that occurs most often."""
    return Counter(values).most_common(1)[0][0]


def _read_files(folder: Path, key: str) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, str]]:
    """Return the settings, the tensors and the metadata of an adapter."""
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError(f"{CONFIG} is not a JSON object")
        with safe_open(folder / WEIGHTS, framework="pt", device="cpu") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - the file is not a dict
            return settings, tensors, opened.metadata() or {}
    except (OSError, ValueError, SafetensorError) as error:
        rule = f"has no readable {CONFIG} and {WEIGHTS}: {error}"
        raise UserError.of(
            key, folder, rule, "set it to a folder that stage=convert stage.format=peft or PEFT's save_pretrained wrote"
        ) from error


def write_peft(folder: Path, adapter: Adapter, config: ModelConfig, *, dropout: float, base_name: str) -> int:
    """Write an adapter in PEFT's format, and return the number of parameters written.

    A stock module that holds several of our layers (GPT-2's c_attn) gets one adapter with the ranks of all of them: its a is their a's, one
    below the other, and its b is block-diagonal.

    Args:
        adapter: the adapter; its `base` is recorded.
        base_name: recorded as base_model_name_or_path.
    """
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    entries = _linear_entries(config)
    for entry, outputs in entries:
        parts = [adapter.layers.get(name.removesuffix(".weight")) for name in entry.names]
        if (joined := _join(entry, parts, outputs)) is not None:
            module = _module(entry)
            tensors[f"{_PREFIX}{module}.lora_A.weight"], tensors[f"{_PREFIX}{module}.lora_B.weight"] = joined.a, joined.b
            ranks[module], alphas[module] = joined.rank, joined.alpha
    modules_to_save = _write_saved(adapter.saved, config, tensors)
    rank, alpha = _commonest(ranks.values()), _commonest(alphas.values())
    transposed = {entry.transposed for entry, _ in entries if _module(entry) in ranks}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": _targets(ranks, map(_module, registry.stock_tensors(config)[0])),
        "rank_pattern": {re.escape(module): value for module, value in ranks.items() if value != rank},
        "alpha_pattern": {re.escape(module): value for module, value in alphas.items() if value != alpha},
        "fan_in_fan_out": transposed == {True},
        "bias": "none",
        "inference_mode": True,
    }
    if modules_to_save:
        settings["modules_to_save"] = modules_to_save
        settings["ensure_weight_tying"] = f"{_PREFIX}{_TIED_HEAD}" in tensors
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt", "base": adapter.base})
    apply_umask(folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return sum(tensor.numel() for tensor in tensors.values())


def _write_saved(saved: Mapping[str, Tensor], config: ModelConfig, tensors: dict[str, Tensor]) -> list[str]:
    """Add the weights that were trained beside an adapter to the tensors of its file, and return the names of their stock modules."""
    modules = []
    for entry in registry.stock_tensors(config)[0]:
        present = [name for name in entry.names if name in saved]
        if present and len(present) < len(entry.names):
            rule = f"trains {', '.join(present)}, which is a part of {_module(entry)} of the stock class"
            raise UserError.of("lora.modules_to_save", present, rule, "export with stage.format=huggingface")
        if present:
            tensors[_PREFIX + entry.hf_name] = entry.to_hf([saved[name] for name in entry.names])
            modules.append(entry.hf_name.rpartition(".")[0])
            if entry.names == (_EMBEDDING,) and _is_tied(config):  # PEFT looks for it under both names
                tensors[_PREFIX + _TIED_HEAD] = saved[_EMBEDDING].clone()
    return list(dict.fromkeys(modules))


def _is_tied(config: ModelConfig) -> bool:
    names = registry.weight_shapes(config)
    return _EMBEDDING in names and not any(name.startswith("head.") and name.endswith(".weight") for name in names)


def _linear_entries(config: ModelConfig) -> list[tuple[StockTensor, list[int]]]:
    """The entries of the stock model's linear layers, each with the outputs of our layers in it."""
    with torch.device("meta"):
        outputs = {f"{name}.weight": layer.out_features for name, layer in linear_layers(registry.build(config))}
    entries = (entry for entry in registry.stock_tensors(config)[0] if entry.names and outputs.keys() >= set(entry.names))
    return [(entry, [outputs[name] for name in entry.names]) for entry in entries]


def _module(entry: StockTensor) -> str:
    return entry.hf_name.removesuffix(".weight")


def _split(entry: StockTensor, b: Tensor, outputs: list[int]) -> list[Tensor]:
    """The part of b of each of our layers in an entry. Stock layers that store transposed weights do not transpose b."""
    return replace(entry, transposed=False).from_hf(b, [(count, b.shape[1]) for count in outputs])


def _join(entry: StockTensor, parts: list[Factors | None], outputs: list[int]) -> Factors | None:
    """The adapter of an entry, from those of its layers, some of which may have none; None if all of them have none."""
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
    return Factors(torch.cat([part.a for part in present]), replace(entry, transposed=False).to_hf(blocks), alpha)


def _targets(modules: Iterable[str], known: Iterable[str]) -> list[str]:
    """The target_modules that select these modules: their last names, or if other modules have the same ones, the full names."""
    chosen = list(modules)
    leaves = list(dict.fromkeys(module.rpartition(".")[2] for module in chosen))
    return leaves if {name for name in known if name.rpartition(".")[2] in leaves} == set(chosen) else chosen


def _matching(patterns: dict[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a module's name, as PEFT matches them."""
    return next((value for pattern, value in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)), default)
