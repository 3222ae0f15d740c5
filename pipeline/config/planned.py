"""The job that stage=plan plans and stage=rehearse rehearses: its stage, and its number of steps."""

from __future__ import annotations

import math
from dataclasses import replace

from pipeline.config import warmup
from pipeline.config.schema import RunConfig, StageConfig
from pipeline.config.stages import Plan

#: Objectives of stage=finetune.
TUNED = ("supervised", "dpo", "classification")


def job_stage(config: RunConfig) -> str:
    """Return the stage of a planned job: finetune if it has settings that only fine-tuning reads, else pretrain."""
    training = config.training
    files = config.data.instructions
    tunes = bool(files.train or files.tokens) or training.objective in TUNED or training.context_factor != 1
    return "finetune" if tunes else "pretrain"


def planned_job(config: RunConfig) -> RunConfig:
    """Return the configuration of the planned job: stage.tokens become training.steps, the smallest number that processes them."""
    stage, training = config.stage, config.training
    if isinstance(stage, Plan) and stage.tokens:
        training = replace(training, steps=max(1, warmup.steps_for_tokens(training, math.ceil(stage.tokens))))
    return replace(config, stage=StageConfig(name=job_stage(config)), training=training)
