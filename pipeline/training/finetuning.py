"""What the configuration of a fine-tuning run gets from its checkpoint, its data and its adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from pipeline.checkpoint import native, peft_format
from pipeline.common.errors import UserError, Violation
from pipeline.config.rules import check, objectives
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.classification import labels_of
from pipeline.models import config_classes
from pipeline.models.config import ModelConfig
from pipeline.models.families.bert import BertConfig
from pipeline.models.rope import extended
from pipeline.training.starting_checkpoint import checkpoint_of_finetuning, is_own


def complete(config: RunConfig, world_size: int, *, layout: bool = True, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration with the objective, the model of the checkpoint, and the layers of lora.adapter.

    Args:
        layout: whether its layout is used, and must be legal.
        overrides: the command line of the run: what it sets of the model must be so in the checkpoint.

    Raises:
        UserError: there is no checkpoint to start from, a file is missing, or a setting does not fit the model.
    """
    config, run_dir = _with_objective(config), Path(config.run_dir)
    try:
        start = checkpoint_of_finetuning(run_dir, config.checkpoint)
    except UserError as error:
        raise UserError([*error.violations, *objectives.violations(config)]) from error
    index = native.read_index(start)
    model = config_classes.from_dict(index.config["model"])
    resumes = (is_own(run_dir, start) or config.checkpoint.fork is not None) and index.train_state.samples
    UserError.raise_for(_other_model(config, model, overrides))
    if not resumes:  # the checkpoints of the run have the longer context already
        model = extended(model, config.training.context_factor)
    return _with_model(config, model, world_size, layout=layout)


def planned(config: RunConfig, world_size: int, *, layout: bool = True) -> RunConfig:
    """As `complete`; without a checkpoint to start from, with the model of the configuration."""
    if has_weights(config):
        return complete(config, world_size, layout=layout)
    return _with_model(_with_objective(config), extended(config.model, config.training.context_factor), world_size, layout=layout)


def has_weights(config: RunConfig) -> bool:
    """Whether a checkpoint to start from is named, or the run has one."""
    return any((config.checkpoint.initialize_from, config.checkpoint.fork)) or bool(native.complete(Path(config.run_dir)))


def _other_model(config: RunConfig, model: ModelConfig, overrides: Sequence[str]) -> list[Violation]:
    """What the command line sets of the model, and the checkpoint has otherwise: a size (`model=`), or single keys (`model.KEY=`).

    A longer context and labels, which fine-tuning gives to a model, are no differences.
    """
    given = {key: value for key, _, value in (word.lstrip("+~").partition("=") for word in overrides) if key.split(".")[0] == "model"}
    rule, fix = (
        "differs from the checkpoint that the run starts from, which has {}",
        "remove it: the model of stage=finetune is that of the checkpoint",
    )
    if not given:
        return []
    if config.model.family != model.family:
        return [Violation(key, value, rule.format(f"model.family={model.family}"), fix) for key, value in given.items()]
    mine = config.model
    if isinstance(model, BertConfig) and isinstance(mine, BertConfig) and model.labels and not mine.labels:
        mine = mine.classifier(model.labels)
    longer = extended(mine, config.training.context_factor)
    different = [
        item.name
        for item in fields(model)
        if getattr(model, item.name) not in (getattr(mine, item.name), getattr(longer, item.name))
        and (f"model.{item.name}" in given or "model" in given)
    ]
    problems = []
    for name in [name for name in different if f"model.{name}" in given]:
        advice = "; training.context_factor makes its context longer" if name.startswith(("rope_", "max_positions")) else ""
        problems.append(Violation(f"model.{name}", getattr(mine, name), rule.format(f"model.{name}={getattr(model, name)}"), fix + advice))
    if implied := [f"model.{name}={getattr(model, name)}" for name in different if f"model.{name}" not in given]:
        problems.append(Violation("model", given["model"], rule.format(", ".join(implied[:4])), fix))
    return problems


def _with_objective(config: RunConfig) -> RunConfig:
    """Answers are predicted unless something else is configured."""
    objective = "supervised" if config.training.objective == "auto" else config.training.objective
    return replace(config, training=replace(config.training, objective=objective))


def _with_model(config: RunConfig, model: ModelConfig, world_size: int, *, layout: bool) -> RunConfig:
    """The configuration with a model, which gets the labels, and with the layers of lora.adapter, checked."""
    if config.training.objective == "classification" and isinstance(model, BertConfig):
        labels = config.data.instructions.labels or model.labels
        model = model.classifier(labels or labels_of(config.data.instructions.train, "data.instructions.train"))
    lora = config.lora
    if lora.adapter is not None:
        lora = peft_format.configured(lora, peft_format.read_peft(Path(lora.adapter), model, "lora.adapter"))
    config = replace(config, model=model, lora=lora)
    UserError.raise_for(check.training_violations(config, world_size) if layout else list(objectives.violations(config)))
    return config
