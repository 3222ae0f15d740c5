"""What the configuration of a fine-tuning run gets from its checkpoint, its data and its adapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.checkpoint import native, peft_format
from pipeline.common.errors import UserError
from pipeline.config.rules import check, objectives
from pipeline.config.schema import RunConfig
from pipeline.data.load.labeled_texts import labels_of
from pipeline.models import config_classes
from pipeline.models.bert.config import BertConfig
from pipeline.models.rope import extended
from pipeline.training.starting_checkpoint import checkpoint_of_finetuning


def complete(config: RunConfig, world_size: int) -> RunConfig:
    """Return the configuration with the objective, the model of the checkpoint, and the layers of lora.adapter.

    Args:
        config: configuration of the run.
        world_size: ranks of the job.

    Raises:
        UserError: there is no checkpoint to start from, a file is missing, or a setting does not fit the model.
    """
    if config.training.objective == "auto":
        config = replace(config, training=replace(config.training, objective="supervised"))
    run_dir = Path(config.run_dir)
    try:
        start = checkpoint_of_finetuning(run_dir, config.checkpoint)
    except UserError as error:
        raise UserError([*error.violations, *objectives.violations(config)]) from error
    index = native.read_index(start)
    model = config_classes.from_dict(index.config["model"])
    resumes = start.resolve().is_relative_to(run_dir.resolve()) and index.train_state.samples
    if not resumes:  # the checkpoints of the run have the longer context already
        model = extended(model, config.training.context_factor)
    if config.training.objective == "classification" and isinstance(model, BertConfig):
        labels = config.data.instructions.labels or model.labels
        model = model.classifier(labels or labels_of(config.data.instructions.train, "data.instructions.train"))
    lora = config.lora
    if lora.adapter is not None:
        lora = peft_format.configured(lora, peft_format.read_peft(Path(lora.adapter), model, "lora.adapter"))
    config = replace(config, model=model, lora=lora)
    if violations := check.training_violations(config, world_size):
        raise UserError(violations)
    return config
