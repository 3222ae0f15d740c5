"""finetune: weights, and prompts or chats with answers, or texts with labels -> checkpoints and metrics.jsonl, on any number of ranks."""

from __future__ import annotations

import logging
from functools import partial

from pipeline.common.ranks import Ranks
from pipeline.config import compose
from pipeline.config.schema import RunConfig
from pipeline.launch import evaluation_jobs
from pipeline.planner import host_memory, out_of_memory
from pipeline.planner.flops import count_model_parameters, peak_flops
from pipeline.training import finetuning
from pipeline.training import run as training_run

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Train as pretrain does, from the weights of a checkpoint. The model is that of the checkpoint; `model=` is not required.

    Raises:
        UserError: there is no checkpoint to start from, the data is missing, or a setting does not fit the model; else as training/run.py.
    """
    config = finetuning.complete(config, ranks.world_size, overrides=compose.task_arguments())
    if ranks.rank == 0:
        log.info("%s", training_run.summary(config, ranks, count_model_parameters(config.model)))
    host_memory.check(config, ranks)
    with out_of_memory.explained(config, ranks):
        training_run.run(config, ranks, partial(evaluation_jobs.checkpoint_hooks, overrides=compose.task_arguments()), peak_flops)
