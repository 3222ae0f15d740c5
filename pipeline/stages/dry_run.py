"""dry_run=true: model state and batch arithmetic of one rank of a training job. Requires neither GPU nor Slurm."""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks
from pipeline.config import compose, phases
from pipeline.config.command_line import key_of, quoted
from pipeline.config.layout import Layout, job_size
from pipeline.config.rules import unread
from pipeline.config.schema import RunConfig
from pipeline.config.stages import TRAINING_STAGES
from pipeline.data.load import blend
from pipeline.launch import job, live, moldable
from pipeline.parallel.parallelize import check_trained
from pipeline.planner import memory_check, rank_report
from pipeline.planner.trace import trace
from pipeline.training import finetuning


def run(config: RunConfig, ranks: Ranks) -> None:
    """Build the model part of one rank on the meta device with a fake process group, and print its layers, memory and batches.

    Raises:
        UserError: the stage does not train, the cluster options of the job are invalid, token shards do not fit the model,
            patterns of frozen weights match none, or the job does not fit in memory.
    """
    if config.stage.name not in TRAINING_STAGES:
        rule, fix = "requires stage=pretrain or finetune", "remove it: other stages have no parallel layout to inspect"
        raise UserError.of("dry_run", "true", rule, fix)
    world_size = job_size(config, ranks.world_size)
    if config.stage.name == "finetune":
        config = finetuning.complete(config, world_size, overrides=compose.task_arguments())
    run_dir = f"run_dir={quoted(config.run_dir)}"  # in a sweep that of the point
    arguments = [run_dir if key_of(word) == "run_dir" else word for word in compose.task_arguments()]
    cluster = live.corrected(config.cluster)
    of_job = (*job.violations(cluster, config.stage.name, Path.cwd()), *moldable.violations(config, arguments))
    UserError.raise_for([*of_job, *blend.violations(config)])
    if ranks.rank > 0:
        return  # single-process mode: additional ranks do nothing
    started = time.perf_counter()
    check_trained(config, Layout.of(config, world_size))
    local, model = rank_report.init_fake(config, world_size)
    result = memory_check.planned(config, world_size)
    print("\n".join(rank_report.lines(config, local, model, trace(config) if result is None else result.trace)))
    if result is not None:
        print("\n" + "\n".join(rank_report.plan_lines(result)), flush=True)
    if refused := memory_check.violation(config, world_size, result):
        raise UserError([refused])
    for number, (phase, size) in enumerate(phases.alone(config, world_size)[1:], 1):
        training, layout = phase.training, Layout.of(phase, size).axes_text()
        batch = f"{training.global_batch_size:,} sequences of {training.sequence_length:,} tokens"
        print(f"\ntraining.phases.{number}: {training.steps:,} steps of {batch}, {layout}")
        if (result := memory_check.planned(phase, size)) is not None:
            print("\n".join(rank_report.plan_lines(result)), flush=True)
        if refused := memory_check.violation(phase, size, result):
            raise UserError([refused])
    submit = live.lines(config, world_size, arguments, has_weights=finetuning.has_weights(config))
    print("\n".join(["", "submit", *submit]))
    for text in (moldable.idle_text(config), *unread.beyond_the_end(config)):
        if text:
            print(f"  {text}")
    print(f"\nbuilt in {time.perf_counter() - started:.1f} s")
