"""Which checkpoints a run may continue or start from: those of the same model, tokenizer and, once samples were consumed, the same data."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.checkpoint.lora_adapter import lora_of
from pipeline.checkpoint.lora_merge import MergedWeights
from pipeline.checkpoint.reader import Checkpoint
from pipeline.common.artifact import MANIFEST
from pipeline.common.atomic_files import digest
from pipeline.common.errors import UserError, Violation
from pipeline.config import phases
from pipeline.config.run_tokenizer import IMPORTED
from pipeline.config.schema import RunConfig
from pipeline.config.training import TrainingConfig
from pipeline.data.load.objectives.objective import Objective
from pipeline.data.tokenize.tokenizer import check_same
from pipeline.models import config_classes
from pipeline.models.rope import extended

log = logging.getLogger("pipeline")
#: Keys of the head of an encoder.
_HEAD = ("model.labels", "model.next_sentence", "model.tie_embeddings")
#: Parts of the configuration whose changes are not named at a resume: they do not change training, or may not differ.
_NOT_OF_TRAINING = {"run_dir", "stage", "model", "clean", "dedup", "evaluation", "cluster", "submit", "certify", "tracking", "dry_run"}
#: Settings of lora that decide which weights a run has, and trains.
_ADAPTER_SETTINGS = ("rank", "alpha", "targets", "rank_pattern", "alpha_pattern", "quantize", "modules_to_save")


def fingerprint_of(config: Mapping[str, Any], checkpoint: Path | None = None) -> str | None:
    """Return the checksum of tokenizer.json, as manifests of token shards record it; None if nothing that tells is there any more.

    Args:
        config: the resolved configuration as nested dictionaries.
        checkpoint: with this configuration; None for a run without one.
    """
    data = config.get("data", {})
    reads_text = config.get("stage", {}).get("name") != "pretrain" or data.get("pairs", {}).get("train")
    for folder in () if reads_text else (data.get("tokens"), *(corpus.get("tokens") for corpus in data.get("blend", {}).values())):
        manifest = None if folder is None else Path(folder) / MANIFEST
        if manifest is not None and manifest.is_file():
            recorded = json.loads(manifest.read_text(encoding="utf-8")).get("totals", {}).get("tokenizer")
            if recorded is not None:
                return str(recorded)
    path = _folder_of(config, checkpoint) / "tokenizer.json"
    return digest(path) if path.is_file() else None


def check_tokenizer(checkpoint: Path, config: Mapping[str, Any], folder: Path) -> None:
    """Refuse to use a checkpoint with this configuration and another tokenizer than it was trained with, as far as that is known.

    Raises:
        UserError: tokenizer.path (folder) is another one.
    """
    trained, theirs = _folder_of(config, checkpoint), fingerprint_of(config, checkpoint)
    known = trained if (trained / "tokenizer.json").is_file() and digest(trained / "tokenizer.json") == theirs else None
    fix = f"set tokenizer.path={known}" if known else "set tokenizer.path to the folder of the tokenizer of that run"
    check_same(folder, theirs, f"{checkpoint}", fix, known)


def _folder_of(config: Mapping[str, Any], checkpoint: Path | None) -> Path:
    """Return the folder of the tokenizer; an imported model has its own in the run directory."""
    if checkpoint is not None and config.get("stage", {}).get("name") == "convert":
        return checkpoint.resolve().parent.parent / IMPORTED
    return Path(config.get("tokenizer", {}).get("path", ""))


def check_same_run(checkpoint: Checkpoint, config: RunConfig, data: Objective, *, is_fork: bool = False) -> None:
    """Refuse to resume with another model, other samples or another optimizer. Layout, batch size, learning rate and others may change.

    A checkpoint that has consumed no sample (an imported model) may continue with any data.

    Args:
        is_fork: whether the checkpoint is that of checkpoint.fork: what it has read may then be other shards.

    Raises:
        UserError: with one violation per difference.
    """
    if not checkpoint.train_state.samples:
        check_tokenizer(checkpoint.path, checkpoint.config, Path(config.tokenizer.path))
    before_it = phases.at(config, max(checkpoint.step - 1, 0))  # the phase in which it was trained
    new, old = dataclasses.asdict(before_it), dict(checkpoint.config)
    old["training"] = dataclasses.asdict(TrainingConfig()) | old["training"]  # an older checkpoint lacks newer keys
    consumed = checkpoint.train_state.samples
    differences = _model_differences(new, old, 1.0 if consumed else config.training.context_factor)
    for key in ("training.seed", "training.sequence_length") if consumed else ():
        if _value(new, key) != _value(old, key):
            differences[key] = f"{_value(old, key)}"
    if consumed and config.training.context_factor != (factor := old["training"].get("context_factor", 1.0)):
        differences["training.context_factor"] = f"{factor}"
    before = old.get("optimizer", {}).get("name", "adamw")
    if checkpoint.train_state.updates and config.optimizer.name != before:  # another one keeps other state
        differences["optimizer.name"] = before
    adapters = dataclasses.asdict(lora_of(old))
    has_adapters = bool(new["lora"]["rank"] or adapters["rank"])
    for name in _ADAPTER_SETTINGS if consumed and has_adapters else ():
        if new["lora"][name] != adapters[name]:
            differences[f"lora.{name}"] = f"{adapters[name]}"
    if consumed and checkpoint.data != data.fingerprint(config, consumed):
        settings = {key: f"{_value(old, key)}" for key in data.settings if _value(new, key) != _value(old, key)}
        if settings or not is_fork or config.data.blend:
            differences |= settings or {data.data_key: f"{_value(old, data.data_key)} with other content"}
        else:
            _check_other_data(checkpoint, config, data)
    fix = "continue with the same model, data and optimizer, or choose another run_dir to start a new run"
    if consumed and not config.training.phases and (phase := phases.text({key: _value(new, key) for key in differences})):
        fix = f"in place of it, begin a phase: training.phases=[{{until_step: {checkpoint.step}}}, {phase}]"
    _refuse(checkpoint, new, differences, fix)
    if is_fork and (violations := list(phases.begin_violations(config, checkpoint.step, consumed))):
        raise UserError(violations)


def _check_other_data(checkpoint: Checkpoint, config: RunConfig, data: Objective) -> None:
    """Refuse other data for a fork that is of another tokenizer, and log that the samples from here on are of other data.

    Raises:
        UserError: the tokenizer is another one.
    """
    new, key, consumed = dataclasses.asdict(config), data.data_key, checkpoint.train_state.samples
    before, now = fingerprint_of(checkpoint.config, checkpoint.path), fingerprint_of(new)
    if None not in (before, now) and before != now:
        rule = f"is of another tokenizer than {key}={_value(checkpoint.config, key)} of {checkpoint.path}"
        raise UserError.of(key, _value(new, key), rule, "tokenize it with the tokenizer of that run")
    if before is None:
        log.warning(
            "%s does not tell the tokenizer of its data any more: make sure that %s=%s has it", checkpoint.path, key, _value(new, key)
        )
    log.info("other data from sample %s on: %s=%s, was %s", f"{consumed:,}", key, _value(new, key), _value(checkpoint.config, key))


def check_same_model(
    checkpoint: Checkpoint | MergedWeights, config: RunConfig, *, other_head: bool = False, context_factor: float = 1.0
) -> None:
    """Refuse to load a checkpoint of another model or tokenizer.

    Args:
        config: its model is that of the checkpoint, with a context that is longer by the factor.
        other_head: accept an encoder with another head.
        context_factor: training.context_factor, if the run begins with this checkpoint.

    Raises:
        UserError: with one violation per difference.
    """
    check_tokenizer(checkpoint.path, checkpoint.config, Path(config.tokenizer.path))
    new = dataclasses.asdict(config)
    differences = _model_differences(new, checkpoint.config, context_factor)
    if other_head:
        differences = {key: old for key, old in differences.items() if key not in _HEAD}
    _refuse(checkpoint, new, differences, "set it to that value, or choose another checkpoint")


def changed_settings(old: Mapping[str, Any], config: RunConfig) -> list[tuple[str, Any, Any]]:
    """The settings of a run that differ from those of a checkpoint or of an earlier start: (key, old, new).

    Not those of its jobs and of what it shows (_NOT_OF_TRAINING), nor of the model, which may not differ.
    """
    new = dataclasses.asdict(config)
    changed = []
    for group in new.keys() - _NOT_OF_TRAINING:
        before = dataclasses.asdict(type(getattr(config, group))()) | old.get(group, {})  # an older checkpoint lacks newer keys
        changed += [(f"{group}.{name}", before[name], value) for name, value in new[group].items() if before[name] != value]
    return sorted(changed, key=lambda setting: setting[0])


def _model_differences(new: dict[str, Any], old: dict[str, Any], context_factor: float) -> dict[str, str]:
    """Keys of the model whose values differ -> the old value."""
    model = config_classes.from_dict(old["model"])  # an older checkpoint lacks newer keys
    old = {"model": dataclasses.asdict(model if context_factor == 1 else extended(model, context_factor))}
    keys = [f"model.{name}" for name in new["model"]]
    return {key: f"{_value(old, key)}" for key in keys if _value(new, key) != _value(old, key)}


def _refuse(checkpoint: Checkpoint | MergedWeights, new: dict[str, Any], differences: dict[str, str], fix: str) -> None:
    """Raise a UserError if there are differences (key -> what the checkpoint was made with)."""
    if differences:
        raise UserError(
            [Violation(key, _value(new, key), f"{checkpoint.path} was made with {old}", fix) for key, old in differences.items()]
        )


def _value(config: dict[str, Any], key: str) -> Any:
    """The value of a dotted key in nested dictionaries; None if it is not there."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None  # type: ignore[assignment]
    return config
