"""Which tool wrote a folder that is imported, by its files; and its weights, with the configuration of their model."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from pipeline.checkpoint.native import TrainState
from pipeline.common.atomic_files import digest
from pipeline.common.errors import UserError, collect_errors
from pipeline.config import loss_weights
from pipeline.conversion import (
    dcp_import,
    deepspeed_import,
    foreign_configs,
    foreign_names,
    huggingface_import,
    megatron_import,
    neox_import,
    stock_logits,
    universal_import,
)
from pipeline.conversion.dcp_import import DcpFolder
from pipeline.conversion.deepspeed_import import DeepSpeedFolder
from pipeline.conversion.foreign_weights import ForeignWeights, NamedTensors, Source
from pipeline.conversion.huggingface_import import MATCH, ImportedWeights
from pipeline.conversion.imported import tokenizer_folder
from pipeline.conversion.megatron_import import MegatronDistributed, MegatronFolder
from pipeline.conversion.named_source import open_weights
from pipeline.conversion.neox_import import NeoxFolder
from pipeline.conversion.stock_weights import StockWeights, weight_files
from pipeline.conversion.universal_import import UniversalFolder
from pipeline.models import config_json, registry
from pipeline.models.config import ModelConfig
from pipeline.models.huggingface_mapping import HuggingFaceMapping

log = logging.getLogger("pipeline")

CONFIG = "config.json"
#: Advice where the model is that of the command line, and where it is that of the settings of the training.
_FIX = "set model= and its sizes to the model of these weights, or put its config.json beside them"
_COMPLETE = "copy the whole folder of the checkpoint, or put the config.json of its model beside it"
KNOWN = (
    "Hugging Face (model*.safetensors)",
    "DeepSpeed (latest, */*_model_states.pt), also universal checkpoints (latest_universal, */zero)",
    "Megatron-LM (iter_*/mp_rank_*/model_optim_rng.pt, or torch_dist: common.pt and .metadata)",
    "GPT-NeoX (layer_*-model_*-model_states.pt)",
    "PyTorch DCP (.metadata and *.distcp), with the names of torchtitan's Llama or of a Hugging Face class",
)


@dataclass(frozen=True)
class Described:
    """The model of a config.json.

    Attributes:
        path: of config.json.
        mapping: of its class.
        training: settings of the group training that it has.
    """

    path: Path
    content: dict[str, Any]
    model: ModelConfig
    mapping: HuggingFaceMapping
    training: dict[str, float]


@dataclass(frozen=True)
class Opened:
    """An opened folder.

    Attributes:
        tool: that wrote it, or its class.
        weights: our weights; call `check`.
        home: folder with config.json, if there is one: that of the files or one above.
        tokenizer: folder with the tokenizer, if there is one.
        described: the model of its config.json, None without one.
        identity: what tells whether the same files were imported before.
        load_stock: returns the model of the source, given its class of transformers; None if the tensors have other names.
        moments: kind -> the moments of the weights, if the folder has them.
        state: steps and updates of the training that the folder continues; zero if it has only weights.
    """

    tool: str
    weights: ImportedWeights | ForeignWeights
    home: Path
    tokenizer: Path
    described: Described | None
    identity: dict[str, Any]
    load_stock: Callable[[Any], nn.Module] | None = None
    moments: dict[str, ImportedWeights] = field(default_factory=dict)
    state: TrainState = field(default_factory=TrainState)


def open_folder(folder: Path, model: ModelConfig) -> Opened:
    """Open a folder of any known format.

    Args:
        folder: stage.input.
        model: that of the command line, which is used if the folder does not tell its model.

    Raises:
        UserError: the format is unknown, a file is missing or damaged, or no family supports the model.
    """
    if not folder.is_dir():
        raise UserError.of("stage.input", folder, "is not a folder", "name the folder of a checkpoint")
    if (step := _huggingface(folder)) is not None:
        return _open_huggingface(step)
    if (step := megatron_import.step_folder(folder)) is not None:
        distributed = megatron_import.is_distributed(step)
        return _open_megatron(folder, MegatronDistributed(step) if distributed else MegatronFolder(step), model)
    if (step := universal_import.step_folder(folder)) is not None:
        return _open_universal(folder, UniversalFolder(step), model)
    if (step := deepspeed_import.tag_folder(folder)) is not None:
        if neox_import.is_neox(step):
            return _open_neox(folder, NeoxFolder(step), model)
        log.info("convert: imported are the weights alone; for the moments and the step, run first: %s", universal_import.command(step))
        return _open_named("DeepSpeed", folder, DeepSpeedFolder(step), deepspeed_import.files(step), model)
    if (step := dcp_import.step_folder(folder)) is not None:
        source = DcpFolder(step)
        return _open_named("PyTorch DCP", folder, source, source.files(), model)
    entries = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())
    listed = ", ".join(entries[:8]) + (f" and {len(entries) - 8} more" if len(entries) > 8 else "")
    rule = f"has no known format; it contains {listed or 'nothing'}. Known are {'; '.join(KNOWN)}"
    raise UserError.of(
        "stage.input", folder, rule, "name the folder of a checkpoint, or save the model with save_pretrained of transformers"
    )


def _huggingface(folder: Path) -> Path | None:
    """Return the folder if it has the weights of a Hugging Face model, or is one whose weights are missing or of an old format.

    Not if it has a universal checkpoint as well, which has the moments of these weights.
    """
    if universal_import.step_folder(folder) is not None:
        return None
    if any(folder.glob("*.safetensors")) or (folder / "model.safetensors.index.json").is_file():
        if (folder / "latest").is_file():
            log.info(
                "convert: %s also has a DeepSpeed checkpoint; imported are the safetensors files, name its folder to import that", folder
            )
        return folder
    others = (megatron_import.step_folder, deepspeed_import.tag_folder, dcp_import.step_folder)
    return folder if (folder / CONFIG).is_file() and not any(other(folder) for other in others) else None


def _open_huggingface(folder: Path) -> Opened:
    described, files, *_ = collect_errors(
        lambda: _described(folder),
        lambda: weight_files(folder),
        lambda: huggingface_import.read_generation_config(folder),
        lambda: huggingface_import.check_tokenizer(folder),
    )
    stock, wrapper = StockWeights(folder, described.mapping), described.mapping.wrapper
    weights = ImportedWeights(stock, described.model)
    identity = {file.name: digest(file) for file in (folder / CONFIG, *files)}
    load = functools.partial(_from_pretrained, folder, described.mapping)
    if wrapper is not None:
        log.info("convert: %s", wrapper.summary(stock.left_out))
    return Opened(described.mapping.architecture, weights, folder, tokenizer_folder(folder), described, identity, load)


def _described(home: Path) -> Described:
    """Read a config.json.

    Raises:
        UserError: with every key that is missing, or has a value that no family supports.
    """
    content = huggingface_import.read_config(home)
    family, mapping = registry.find_mapping(content)
    content = mapping.language_model(content)
    model, training = collect_errors(lambda: config_json.read(mapping, family.config, content), lambda: mapping.training_settings(content))
    # A family that may have no experts has weights of their losses only with some.
    training = {name: value for name, value in training.items() if name in loss_weights.defaults(model)}
    return Described(home / CONFIG, content, model, mapping, training)


def _from_pretrained(folder: Path, mapping: HuggingFaceMapping, stock_class: Any) -> nn.Module:
    """Return the model of a folder in its stock class.

    Raises:
        UserError: the class cannot be built from config.json, or does not find its weights.
    """
    if mapping.wrapper is not None:
        stock_class = getattr(importlib.import_module("transformers"), mapping.wrapper.architecture)
    fix = "correct config.json, or save the model again with transformers"
    try:
        config = stock_class.config_class.from_pretrained(folder)
        if config.model_type in mapping.other_model_types:
            config.model_type = mapping.model_type  # by which transformers renames the tensors of the files
        if isinstance(quantization := getattr(config, "quantization_config", None), dict):
            quantization["dequantize"] = True  # its products in few bits need kernels and a GPU
        model, report = stock_class.from_pretrained(folder, config=config, **stock_logits.IN_FP32, output_loading_info=True)
    except Exception as error:  # whatever the class raises for a value that it does not check
        rule = f"cannot be loaded by {stock_class.__name__}: {type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError.of("stage.input", folder, rule, fix) from error
    if missing := sorted(report["missing_keys"]):
        raise UserError.of("stage.input", folder, f"lacks weights of {stock_class.__name__}, such as {missing[0]}", fix)
    stock_model: nn.Module = model
    return stock_model


def _home(folder: Path, step: Path) -> tuple[Path, Described | None]:
    """Return the folder with config.json, that of the files, the one named, or the one above, and its model."""
    for home in (step, folder, *([folder.parent] if step == folder else [])):
        if (home / CONFIG).is_file():
            log.info("convert: the model is that of %s", home / CONFIG)
            return home, _described(home)
    return folder, None


def _open_universal(folder: Path, source: UniversalFolder, model: ModelConfig) -> Opened:
    """Open a universal checkpoint of DeepSpeed, with its moments.

    Raises:
        UserError: its parameters do not have the names of a Hugging Face class, are not those of the model, or lack moments.
    """
    opened, named = _open_state_dict("DeepSpeed's universal format", folder, source.weights, source.files(), model)
    if named is None or not isinstance(opened.weights, ImportedWeights):
        rule = f"has parameters with other names than those of the Hugging Face class: {', '.join(source.weights.names()[:3])}, ..."
        fix = "import the folder that ds_to_universal has converted, of which the weights are read"
        raise UserError.of("stage.input", source.path, rule, fix)
    opened.weights.check()  # before its moments are compared with it
    if (folder / "latest").is_file():
        log.info("convert: imported is %s with its moments; name the folder of a step to import other weights", source.path)
    return dataclasses.replace(opened, moments=source.moments(opened.weights, named), state=source.state)


def _open_named(tool: str, folder: Path, source: Source, files: list[Path], model: ModelConfig) -> Opened:
    """Open a state dict, whose names may be of several tools, and that does not tell its model."""
    return _open_state_dict(tool, folder, source, files, model)[0]


def _open_state_dict(tool: str, folder: Path, source: Source, files: list[Path], model: ModelConfig) -> tuple[Opened, NamedTensors | None]:
    """As _open_named; and the tensors if they have the names of the Hugging Face class."""
    home, described = _home(folder, source.path)
    config = described.model if described else model
    origin = str(described.path) if described else f"model= of family {model.family}, since there is no {CONFIG}"
    if not described:
        log.info("convert: the model is that of %s", origin)
    weights, stock = open_weights(source, config, origin, MATCH if described else _FIX)
    load = functools.partial(_from_tensors, stock, source, config, described) if stock is not None else None
    return Opened(tool, weights, home, tokenizer_folder(home), described, _identity(source.path, files), load), stock


def _from_tensors(stock: NamedTensors, source: Source, config: ModelConfig, described: Described | None, stock_class: Any) -> nn.Module:
    """Return the stock model with the tensors of a state dict; those of ZeRO are joined by DeepSpeed's own reader."""
    joined = source.joined() if isinstance(source, DeepSpeedFolder) else {}
    values = {name: joined[original] if original in joined else stock.tensor(name) for name, original in stock.originals.items()}
    content = described.content if described else registry.mapping_of(config).config_json(config)
    # Which renames weights and fuses experts as the installed release does; tied weights may be absent; the names have been checked.
    config_of_stock = stock_class.config_class(**content)
    model: nn.Module = stock_class.from_pretrained(None, config=config_of_stock, state_dict=values, **stock_logits.IN_FP32)
    return model


def _open_megatron(folder: Path, source: MegatronFolder | MegatronDistributed, model: ModelConfig) -> Opened:
    home, described = _home(folder, source.path)
    config, fix = _configured(described, source.arguments, lambda args: foreign_configs.megatron(args, source), model)
    weights = ForeignWeights(source, foreign_names.megatron(gated=config.family != "gpt"), config, fix)
    above = [source.path.parent] if (source.path.parent / megatron_import.TRACKER).is_file() else []
    tokenizer = tokenizer_folder(home, *above)  # stage.format=megatron writes it beside the folder of the step
    return Opened("Megatron-LM", weights, home, tokenizer, described, _identity(source.path, source.files()))


def _open_neox(folder: Path, source: NeoxFolder, model: ModelConfig) -> Opened:
    home, described = _home(folder, source.path)
    settings = source.settings if "num_attention_heads" in source.settings else None
    config, fix = _configured(described, settings, lambda values: foreign_configs.neox(values, source, source.layers), model)
    current = any(".mlp.linear1." in name for name in source.names())  # names of the releases whose grouped queries have another order
    part = foreign_names.concatenated if current and config.kv_heads != config.heads else foreign_names.query_heads
    weights = ForeignWeights(source, foreign_names.neox(gated=config.family != "gpt", part=part), config, fix)
    return Opened("GPT-NeoX", weights, home, tokenizer_folder(home), described, _identity(source.path, source.files()))


def _configured(
    described: Described | None, settings: dict[str, Any] | None, read: Callable[[dict[str, Any]], ModelConfig], model: ModelConfig
) -> tuple[ModelConfig, str]:
    """Return the model of a config.json, else that of the settings of the training, else that of the command line; and advice."""
    if described is not None:
        return described.model, MATCH
    if settings:
        return read(settings), _COMPLETE
    log.info("convert: the model is that of model=, since the checkpoint has no settings and there is no %s", CONFIG)
    return model, _FIX


def _identity(folder: Path, files: list[Path]) -> dict[str, Any]:
    """Return sizes and times of files, which may be terabytes."""
    stats = {str(path.relative_to(folder)): path.stat() for path in files}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}


def report(opened: Opened, unused: list[str]) -> None:
    """Log what the import changes or ignores."""
    if unused:
        log.warning("convert: the model does not use %s; skipped", ", ".join(unused))
    if (described := opened.described) is None:
        return
    for name in (entry.name for entry in dataclasses.fields(described.model)):
        if getattr(opened.weights.config, name) != getattr(described.model, name):
            log.info("convert: model.%s=%s, according to the weights", name, getattr(opened.weights.config, name))
    content, mapping = described.content, described.mapping
    if ignored := config_json.unread(mapping, content):
        log.info("convert: %s does not read %s; an export keeps them", mapping.architecture, ", ".join(sorted(ignored)))
    if dropout := [f"{key}={content[key]}" for key in sorted(content) if config_json.is_dropout(key) and content[key]]:
        log.warning("convert: %s is ignored: dropout is not supported in training", ", ".join(dropout))
