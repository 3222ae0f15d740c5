"""dry_run=true: model state and batch arithmetic of one rank of a training job. Requires neither GPU nor Slurm."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks
from pipeline.config import warmup
from pipeline.config.layout import Layout, job_size
from pipeline.config.schema import RunConfig
from pipeline.data.load.blend import phases
from pipeline.data.load.blend_schedule import BlendSchedule
from pipeline.launch import job
from pipeline.parallel import mesh
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel, parallelize
from pipeline.planner import memory_check
from pipeline.planner.parameter_counts import count_local_parameters, count_model_parameters, count_primary_parameters
from pipeline.planner.plan import JobPlan
from pipeline.planner.state_memory import frozen_bytes, rank_state
from pipeline.stages import finetune
from pipeline.training.optimizers import OPTIMIZERS

GIB = 1 << 30


def run(config: RunConfig, ranks: Ranks) -> None:
    """Build the model part of one rank on the meta device with a fake process group, and print its layers, memory and batches.

    Raises:
        UserError: the cluster options of the job are invalid, or the job does not fit in memory.
    """
    if config.stage.name == "finetune":
        config = finetune.completed(config, job_size(config, ranks.world_size))
    if problems := job.violations(config.cluster, config.stage.name, Path.cwd()):
        raise UserError(problems)
    if ranks.rank > 0:
        return  # single-process mode: additional ranks do nothing
    started = time.perf_counter()
    local, model = init_fake(config, job_size(config, ranks.world_size))
    layout = local.layout
    sbatch = job.sbatch_line(config.cluster, config.stage.name, layout.world_size, HydraConfig.get().overrides.task)
    lines = [*rank_lines(config, layout), *stage_lines(config, local, model), *memory_lines(config, local, model)]
    lines += [*batch_lines(config, layout), "", sbatch]
    result = memory_check.planned(config, layout.world_size)
    print("\n".join([*lines, *([] if result is None else ["", *plan_lines(result)])]))
    if refused := memory_check.violation(config, layout.world_size, result):
        raise UserError([refused])
    print(f"\nbuilt in {time.perf_counter() - started:.1f} s")


def init_fake(config: RunConfig, world_size: int) -> tuple[Mesh, LocalModel]:
    """Return the mesh of rank `dry_run.rank` and its part of the model on the meta device."""
    device = mesh.init_fake(config.dry_run.rank, world_size)
    try:
        local = mesh.build_mesh(Layout.of(config, world_size), device)
        return local, parallelize(config, local)
    finally:
        mesh.destroy_process_group()


def rank_lines(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Yield the coordinates of the rank on each mesh axis."""
    coordinates = layout.coordinates(config.dry_run.rank)
    yield f"rank {config.dry_run.rank} of {layout.world_size:,}"
    for axis in ("pipeline", "data", "expert", "context", "tensor"):
        yield f"  {axis:<16}{getattr(coordinates, axis)} of {getattr(layout, axis)}"


def plan_lines(result: JobPlan) -> Iterator[str]:
    """Yield the planned memory of the fullest rank and time of a step; stage=plan prints their parts."""
    memory = result.estimate.memory.total / 1e9
    yield f"planned on {result.hardware.name} (details: stage=plan)"
    yield f"  {'memory':<14}{memory:9.1f} GB of {result.hardware.memory_gb:.1f} GB on the fullest rank"
    yield f"  {'step':<14}{result.estimate.step_time:9.2f} s"


def stage_lines(config: RunConfig, local: Mesh, model: LocalModel) -> Iterator[str]:
    """Yield the pipeline stages of the rank and their number of parameters."""
    yield "holds"
    for index, stage in model.stages.items():
        layers = [int(key) for key in stage.blocks]  # type: ignore[union-attr]
        held = [name for name in ("embed", "norm", "head") if getattr(stage, name) is not None]
        blocks = f"layers {layers[0]} to {layers[-1]} ({len(layers)} of {config.model.layers})"
        yield f"  {f'stage {index}':<16}{', '.join([blocks, *held])}"
    primary, total = count_primary_parameters(model, local), count_model_parameters(config.model)
    yield f"  {'parameters':<16}{count_local_parameters(model):,}"
    of_model = "with adapters" if config.lora.rank else f"of {total:,}"
    yield f"  {'primary copies':<16}{primary:,} {of_model} (each replicated parameter is counted on one rank only)"


def memory_lines(config: RunConfig, local: Mesh, model: LocalModel) -> Iterator[str]:
    """Yield the size of weights, gradients and optimizer state on the rank."""
    zero = config.parallel.zero_stage
    state, tensors = rank_state(config, model, local), OPTIMIZERS[config.optimizer.name].state
    master = "" if zero == 0 and config.precision.dtype == "fp32" else "master weights and "
    over = f", sharded over {local.dense.size()} data ranks"
    if local.layout.expert > 1:
        over += f" (experts: {local.data.size()})"
    yield f"model state under ZeRO {zero} (without activations and buffers)"
    yield f"  {'weights':<16}{state.weights / GIB:9.3f} GiB  {config.precision.dtype}{over if zero == 3 else ''}"
    if model.frozen:
        kind = "" if config.lora.quantize == "none" else f", linear layers of the blocks in {config.lora.quantize}"
        yield f"  {'  frozen':<16}{frozen_bytes(config, model) / GIB:9.3f} GiB  of these, not sharded over data ranks{kind}"
    yield f"  {'gradients':<16}{state.gradients / GIB:9.3f} GiB  fp32{over if zero >= 2 else ''}"
    yield f"  {'optimizer':<16}{state.optimizer / GIB:9.3f} GiB  fp32 {master}{' and '.join(tensors)}{over if zero else ''}"
    yield f"  {'total':<16}{state.total / GIB:9.3f} GiB"


def batch_lines(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Yield the samples and tokens of a step and of the run."""
    training = config.training
    tokens = training.global_batch_size * training.sequence_length
    yield "a step"
    yield f"  {'sequences':<16}{training.global_batch_size:,} of {training.sequence_length:,} tokens = {tokens:,} tokens"
    yield f"  {'a rank':<16}{layout.micro_batches:,} micro-batches of {training.micro_batch_size}"
    yield "the run"
    samples = warmup.samples(training, training.steps)
    yield f"  {'steps':<16}{training.steps:,} = {samples * training.sequence_length:,} tokens"
    if training.token_budget:
        steps = warmup.steps_for_tokens(training, training.token_budget)
        yield f"  {'token budget':<16}{training.token_budget:,} tokens = training.steps={steps}"
    if config.data.blend and config.data.blend_weights == "samples":  # epochs would require the corpus sizes
        yield "the blend"
        for name, count in zip(sorted(config.data.blend), BlendSchedule(phases(config)).counts(samples).tolist(), strict=True):
            yield f"  {name:<16}{count * training.sequence_length:,} tokens, {100 * count / samples:.2f} %"
