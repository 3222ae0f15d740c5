"""finetune: weights, and prompts or chats with answers, or texts with labels -> checkpoints and metrics.jsonl, on any number of ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pipeline.checkpoint import native, peft_format
from pipeline.common import knobs
from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks
from pipeline.config.rules import check, objectives
from pipeline.config.schema import RunConfig
from pipeline.data.load.labels import labels_of
from pipeline.models import config_classes
from pipeline.models.bert.config import BertConfig
from pipeline.models.rope import extended
from pipeline.stages import pretrain


def run(config: RunConfig, ranks: Ranks) -> None:
    """Train as pretrain does, from the weights of a checkpoint. The model is that of the checkpoint; `model=` is not required.

    Raises:
        UserError: there is no checkpoint to start from, the data is missing, or a setting does not fit the model; else as pretrain.
    """
    pretrain.run(completed(config, ranks.world_size), ranks)


def completed(config: RunConfig, world_size: int) -> RunConfig:
    """Return the configuration with the objective, the model of the checkpoint, and the layers of lora.adapter.

    Raises:
        UserError: as run.
    """
    if config.training.objective == "auto":
        config = knobs.changed(config, {"training.objective": "supervised"})
    try:
        start = _start(config)
    except UserError as error:
        raise UserError([*error.violations, *objectives.violations(config)]) from error
    index = native.read_index(start)
    model = config_classes.from_dict(index.config["model"])
    if not (_in_run_dir(config, start) and index.train_state.samples):  # the checkpoints of the run have the longer context already
        model = extended(model, config.training.context_factor)
    if config.training.objective == "classification" and isinstance(model, BertConfig):
        model = model.classifier(_labels(config, model))
    lora = config.lora
    if lora.adapter is not None:
        lora = peft_format.configured(lora, peft_format.read_peft(Path(lora.adapter), model, "lora.adapter"))
    config = dataclasses.replace(config, model=model, lora=lora)
    if found := check.training_violations(config, world_size):
        raise UserError(found)
    return config


def _labels(config: RunConfig, model: BertConfig) -> list[str]:
    """Return the labels: configured ones, else those of the checkpoint, else those of the training files.

    Raises:
        UserError: a file is missing.
    """
    data = config.data.instructions
    return data.labels or model.labels or labels_of(data.train, "data.instructions.train")


def _in_run_dir(config: RunConfig, checkpoint: Path) -> bool:
    """Whether a checkpoint is one of the run directory."""
    return checkpoint.resolve().is_relative_to(Path(config.run_dir).resolve())


def _start(config: RunConfig) -> Path:
    """Return the checkpoint that the run continues or starts from.

    Raises:
        UserError: there is none.
    """
    if found := pretrain.starting_checkpoint(config):
        return found
    if config.checkpoint.initialize_from is not None:
        return pretrain.initial_checkpoint(config.checkpoint.initialize_from)
    rule = f"is required: fine-tuning starts from trained weights, and {config.run_dir} has none"
    fix = f"name a run directory or checkpoint, or import a model: stage=convert stage.input=FOLDER run_dir={config.run_dir}"
    raise UserError.of("checkpoint.initialize_from", None, rule, fix)
