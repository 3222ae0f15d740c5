"""What the configuration of a fine-tuning run gets from its checkpoint, its data and its adapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.checkpoint import native, peft_format
from pipeline.common.errors import UserError
from pipeline.config.schema import RunConfig
from pipeline.data.load.labels import labels_of
from pipeline.data.load.objectives.registry import objective_of
from pipeline.models import families
from pipeline.models.bert.config import BertConfig
from pipeline.models.rope import extended
from pipeline.training.starting_checkpoint import checkpoint_of_finetuning


def complete(config: RunConfig) -> RunConfig:
    """Return the configuration with the objective, the model of the checkpoint, and the layers of lora.adapter.

    Raises:
        UserError: there is no checkpoint to start from, or a file is missing.
    """
    if config.training.objective == "auto":
        config = replace(config, training=replace(config.training, objective="supervised"))
    run_dir = Path(config.run_dir)
    try:
        start = checkpoint_of_finetuning(run_dir, config.checkpoint)
    except UserError as error:
        raise UserError([*error.violations, *objective_of(config).violations(config)]) from error
    index = native.read_index(start)
    model = families.from_dict(index.config["model"])
    resumes = start.resolve().is_relative_to(run_dir.resolve()) and index.train_state.samples
    if not resumes:  # the checkpoints of the run have the longer context already
        model = extended(model, config.training.context_factor)
    if config.training.objective == "classification" and isinstance(model, BertConfig):
        labels = config.data.instructions.labels or model.labels
        model = model.classifier(labels or labels_of(config.data.instructions.train, "data.instructions.train"))
    config = replace(config, model=model)
    if config.lora.adapter is None:
        return config
    adapter = peft_format.read_peft(Path(config.lora.adapter), model, "lora.adapter")
    return replace(config, lora=peft_format.configured(config.lora, adapter))
