"""What the configuration of an evaluation gets from the checkpoint: the model, the objective of fine-tuning, and the adapter of DPO."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.checkpoint import native
from pipeline.checkpoint.load_any_layout import open_on_all_ranks
from pipeline.checkpoint.lora_adapter import lora_of
from pipeline.checkpoint.lora_merge import open_merged
from pipeline.checkpoint.native import TrainState
from pipeline.checkpoint.peft_format import configured, read_peft
from pipeline.checkpoint.reader import with_weights
from pipeline.common.errors import UserError
from pipeline.config.lora import LoraConfig
from pipeline.config.preferences import has_reference
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Evaluate
from pipeline.evaluation.checkpoint_selection import ALL
from pipeline.models import config_classes
from pipeline.training import resume
from pipeline.training.trainer import Trainer


def complete(config: RunConfig, stage: Evaluate, world_size: int) -> RunConfig:
    """Return the configuration with the model of the checkpoint, with stage.checkpoint=all that of the newest one.

    Adapters are merged into the weights, so that there are none, except for the pairs of DPO, whose reference is the model without them.

    Args:
        config: configuration of the job.
        stage: the settings of the evaluation.
        world_size: ranks of the job.

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
        names = ("dpo_beta", "preference_loss", "simpo_margin")
        training = replace(training, **{name: trained["training"][name] for name in names if name in trained["training"]})
    compares = has_reference(replace(config, model=model, training=training))
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
    if violations := check.evaluation_violations(config, world_size):
        raise UserError(violations)
    return config


def fits(config: RunConfig, path: Path) -> bool:
    """Return whether a checkpoint can be evaluated with the configuration of `complete`, which is that of another checkpoint of the run.

    The model that fine-tuning has begun with may have no labels, another context, or no adapter.
    """
    trained = native.read_index(path).config
    has_adapter = bool(lora_of(trained).rank) or not config.lora.rank or config.lora.adapter is not None
    return has_adapter and config_classes.from_dict(trained["model"]) == config.model


def load(config: RunConfig, stage: Evaluate, trainer: Trainer, path: Path) -> TrainState:
    """Load the weights of a checkpoint into the trainer, and return its state; collective. The configuration is that of `complete`.

    Raises:
        UserError: as the functions that it calls.
    """
    if config.lora.adapter is not None:
        checkpoint = with_weights(open_on_all_ranks(path), stage.weights)
        resume.initialize(config, trainer, checkpoint)
        return checkpoint.train_state
    checkpoint = with_weights(open_on_all_ranks(path), stage.weights)
    return resume.load(trainer, checkpoint if config.lora.rank else open_merged(checkpoint, stage.adapter))
