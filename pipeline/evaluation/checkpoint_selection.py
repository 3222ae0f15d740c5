"""Which checkpoints a job evaluates, and what its configuration gets from them: model, objective of fine-tuning, and adapter of DPO."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.checkpoint import catalog, native, reader
from pipeline.checkpoint.load_any_layout import open_on_all_ranks
from pipeline.checkpoint.lora_adapter import lora_of
from pipeline.checkpoint.lora_merge import open_merged
from pipeline.checkpoint.native import TrainState
from pipeline.checkpoint.peft_format import WEIGHTS, configured, read_peft
from pipeline.checkpoint.reader import with_weights
from pipeline.common.atomic_files import digest
from pipeline.common.errors import UserError
from pipeline.common.ranks import array_task
from pipeline.config.lora import LoraConfig
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Evaluate
from pipeline.data.load.objectives.supervised import Preferences
from pipeline.evaluation import record
from pipeline.models import config_classes
from pipeline.training import resume
from pipeline.training.trainer import Trainer

log = logging.getLogger("pipeline")

#: The value of stage.checkpoint that selects every checkpoint of run_dir.
ALL = "all"


def settings_of(path: Path, stage: Evaluate, settings: dict[str, Any]) -> dict[str, Any]:
    """Return what the scores of a checkpoint depend on: its content, the adapter, and the settings of the evaluation.

    Raises:
        DamagedCheckpointError: the checkpoint was removed since it was chosen.
    """
    native.with_index(path)
    adapter = None if stage.adapter is None else digest(Path(stage.adapter) / WEIGHTS)
    return {
        "stage.checkpoint": digest(path / native.INDEX),
        "stage.adapter": adapter,
        **reader.settings_of_weights(stage.weights),
        **settings,
    }


def current(run_dir: Path, stage: Evaluate, path: Path) -> list[Path]:
    """Return a chosen checkpoint, or the newest one by now if stage.checkpoint is "latest"."""
    return [native.find(run_dir, stage.checkpoint) if stage.checkpoint == "latest" else path]


def checkpoints(run_dir: Path, stage: Evaluate, kind: str, settings: dict[str, Any], steps: int = 0) -> list[Path]:
    """Return the checkpoints to evaluate: the one that is named, or with stage.checkpoint=all those that were not evaluated yet.

    The tasks of a Slurm job array share the checkpoints.

    Args:
        kind: as in record.path_of.
        settings: what the scores depend on besides the checkpoint.
        steps: training.steps; with stage.every, the last checkpoint is evaluated, too.

    Raises:
        UserError: there is none.
    """
    if stage.checkpoint != ALL:
        return [native.find(run_dir, stage.checkpoint)]
    complete = [native.folder_of(run_dir, step) for step in catalog.listed(run_dir)]  # those that a user copied there, too
    if not complete:
        fix = f"set run_dir to that of a run, or run stage=pretrain with {run_dir} first"
        raise UserError.of("run_dir", run_dir, "contains no checkpoint", fix)
    complete = [path for path in complete if record.is_due(native.step_of(path), stage.every, steps)]
    task = array_task()
    mine = complete if task is None else complete[task.index :: task.size]
    missing = [path for path in mine if not record.is_recorded(run_dir, native.step_of(path), kind, settings_of(path, stage, settings))]
    if len(missing) < len(mine):
        log.info("evaluate: %d of %d checkpoints are evaluated already", len(mine) - len(missing), len(mine))
    return missing


def complete_config(config: RunConfig, stage: Evaluate, world_size: int) -> RunConfig:
    """Return the configuration with the model of the checkpoint, with stage.checkpoint=all that of the newest one.

    Adapters are merged into the weights, so that there are none, except for the pairs of DPO, whose reference is the model without them.

    Raises:
        UserError: there is no checkpoint, or a setting does not fit its model.
    """
    path = native.find(Path(config.run_dir), "latest" if stage.checkpoint == ALL else stage.checkpoint)
    trained = native.read_index(path).config
    model, training = config_classes.from_dict(trained["model"]), config.training
    lines = config.data.instructions.validation or config.data.instructions.tokens
    if training.objective == "auto" and lines and model.objective == "causal":
        before = trained["training"].get("objective", "auto")
        training = replace(training, objective="supervised" if before == "auto" else before)
    if training.objective == "auto" and trained["training"].get("objective") == "masked_diffusion" and not stage.pseudo_perplexity:
        training = replace(training, objective="masked_diffusion", diffusion_eps=trained["training"]["diffusion_eps"])
    if training.objective == "dpo" and trained["training"].get("objective") == "dpo":
        given = {name: trained["training"][name] for name in Preferences.loss_settings if name in trained["training"]}
        training = replace(training, **given)
    compares = replace(config, model=model, training=training).has_reference
    lora = LoraConfig()
    if training.objective == "dpo" and stage.adapter is not None:
        lora = configured(LoraConfig(adapter=stage.adapter), read_peft(Path(stage.adapter), model, "stage.adapter"))
    elif training.objective == "dpo":
        lora = replace(lora_of(trained), adapter=None)
        if lora.rank == 0 and compares:
            rule = "has no adapter, and the reference of training.objective=dpo is the model without it"
            fix = "name a checkpoint of a run with adapters, set stage.adapter, or evaluate with training.preference_loss=simpo or orpo"
            raise UserError.of("stage.checkpoint", path, rule, fix)
    config = replace(config, model=model, training=replace(training, ema=None), lora=lora)
    UserError.raise_for(check.evaluation_violations(config, world_size))
    return config


def fits_config(config: RunConfig, path: Path) -> bool:
    """Return whether a checkpoint can be evaluated with the configuration of `complete_config`, made for another checkpoint of the run.

    The model that fine-tuning has begun with may have no labels, another context, or no adapter.
    """
    trained = native.read_index(path).config
    has_adapter = bool(lora_of(trained).rank) or not config.lora.rank or config.lora.adapter is not None
    return has_adapter and config_classes.from_dict(trained["model"]) == config.model


def load_weights(config: RunConfig, stage: Evaluate, trainer: Trainer, path: Path) -> TrainState:
    """Load the weights of a checkpoint into the trainer, and return its state; collective. The configuration is that of `complete_config`.

    Raises:
        UserError: as the functions that it calls.
    """
    checkpoint = with_weights(open_on_all_ranks(path), stage.weights)
    if config.lora.adapter is not None:
        resume.initialize(config, trainer, checkpoint)
        return checkpoint.train_state
    return resume.load(trainer, checkpoint if config.lora.rank else open_merged(checkpoint, stage.adapter))
