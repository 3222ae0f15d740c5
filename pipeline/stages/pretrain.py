"""pretrain: token shards -> checkpoints and metrics.jsonl, on any number of ranks."""

from __future__ import annotations

import logging
from functools import partial

from pipeline.common.ranks import Ranks
from pipeline.config import compose
from pipeline.config.schema import RunConfig
from pipeline.launch import certified, evaluation_jobs
from pipeline.planner import host_memory, out_of_memory
from pipeline.planner.flops import count_model_parameters, peak_flops
from pipeline.training import run as training_run

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Train up to training.steps, starting from the newest checkpoint of run_dir; raises as certified.check and training/run.py."""
    certified.check(config, ranks.world_size)
    if ranks.rank == 0:
        log.info("%s", training_run.summary(config, ranks, count_model_parameters(config.model)))
    host_memory.check(config, ranks)
    with out_of_memory.explained(config, ranks):
        training_run.run(config, ranks, partial(evaluation_jobs.checkpoint_hooks, overrides=compose.task_arguments()), peak_flops)
