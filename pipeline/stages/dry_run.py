"""dry_run=true: what one rank of a pretraining job would hold and do. No GPU, no Slurm, no other rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from pipeline.config import warmup
from pipeline.config.layout import Layout, job_size
from pipeline.config.schema import RunConfig
from pipeline.data.load.blend import phases
from pipeline.data.load.blend_schedule import BlendSchedule
from pipeline.errors import UserError
from pipeline.launch import job
from pipeline.launch.ranks import Ranks
from pipeline.parallel import mesh
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import DTYPES, LocalModel, parallelize
from pipeline.planner.memory import model_state
from pipeline.planner.parameters import count_local_parameters, count_model_parameters, count_primary_parameters
from pipeline.training.optimizers import OPTIMIZERS

GIB = 1 << 30


def run(config: RunConfig, ranks: Ranks) -> None:
    """Be the rank on a fake process group, build its part of the model on the meta device, and print what there is to know.

    Raises:
        UserError: the stage is another one than pretrain, or its job cannot be written.
    """
    if config.stage.name != "pretrain":
        raise UserError.of("dry_run.enabled", True, "is for stage=pretrain", "leave it out: the other stages hold no piece of a model")
    if problems := job.violations(config.cluster, config.stage.name, Path.cwd()):
        raise UserError(problems)
    if ranks.rank > 0:
        return  # one process imagines, however many were started
    started = time.perf_counter()
    local, model = init_fake(config, job_size(config, ranks.world_size))
    layout = local.layout
    sbatch = job.sbatch_line(config.cluster, config.stage.name, layout.world_size, HydraConfig.get().overrides.task)
    lines = [*place(config, layout), *parts(config, local, model), *memory(config, layout, model), *batch(config, layout), "", sbatch]
    print("\n".join(lines))
    print(f"\nbuilt in {time.perf_counter() - started:.1f} s")


def init_fake(config: RunConfig, world_size: int) -> tuple[Mesh, LocalModel]:
    """The mesh and the part of the model, on the meta device, of rank `dry_run.rank` among so many."""
    device = mesh.init_fake_distributed(config.dry_run.rank, world_size)
    try:
        local = mesh.build_mesh(Layout.of(config, world_size), device)
        return local, parallelize(config, local)
    finally:
        mesh.destroy_process_group()


def place(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Where the rank stands."""
    where = layout.coordinates(config.dry_run.rank)
    yield f"rank {config.dry_run.rank} of {layout.world_size:,}"
    for axis in ("pipeline", "data", "expert", "context", "tensor"):
        yield f"  {axis:<14}{getattr(where, axis)} of {getattr(layout, axis)}"


def parts(config: RunConfig, local: Mesh, model: LocalModel) -> Iterator[str]:
    """The stages of the rank and how many parameters they hold."""
    yield "holds"
    for index, stage in model.stages.items():
        layers = [int(key) for key in stage.blocks]  # type: ignore[union-attr]
        held = [name for name in ("embed", "norm", "head") if getattr(stage, name) is not None]
        blocks = f"layers {layers[0]} to {layers[-1]} ({len(layers)} of {config.model.layers})"
        yield f"  {f'stage {index}':<14}{', '.join([blocks, *held])}"
    primary, total = count_primary_parameters(model, local), count_model_parameters(config.model)
    yield f"  {'parameters':<14}{count_local_parameters(model):,}"
    yield f"  {'primary copies':<14}{primary:,} of {total:,} (what other ranks of the model hold too counts once)"


def memory(config: RunConfig, layout: Layout, model: LocalModel) -> Iterator[str]:
    """Bytes of model state."""
    zero = config.parallel.zero_stage
    parameters, dtype = count_local_parameters(model), DTYPES[config.precision.dtype]
    ranks, tensors = layout.data * layout.context, OPTIMIZERS[config.optimizer.name].state
    state = model_state(parameters, dtype=dtype, zero_stage=zero, data=ranks, state_tensors=len(tensors))
    master = "" if zero == 0 and config.precision.dtype == "fp32" else "master weights and "
    shared = f"over {layout.data * layout.context} data ranks"
    yield f"model state under ZeRO {zero} (activations and buffers come on top)"
    yield f"  {'weights':<14}{state.weights / GIB:9.3f} GiB  {config.precision.dtype}{f', sharded {shared}' if zero == 3 else ''}"
    yield f"  {'gradients':<14}{state.gradients / GIB:9.3f} GiB  fp32, whole until they are reduced at the end of a step"
    kept = f"{master}{' and '.join(tensors)}"
    yield f"  {'optimizer':<14}{state.optimizer / GIB:9.3f} GiB  fp32 {kept}{f', sharded {shared}' if zero else ''}"
    yield f"  {'sum':<14}{state.total / GIB:9.3f} GiB"


def batch(config: RunConfig, layout: Layout) -> Iterator[str]:
    """The arithmetic of a step and of the run."""
    training = config.training
    tokens = training.global_batch_size * training.sequence_length
    yield "a step"
    yield f"  {'sequences':<14}{training.global_batch_size:,} of {training.sequence_length:,} tokens = {tokens:,} tokens"
    yield f"  {'a rank':<14}{layout.micro_batches:,} micro-batches of {training.micro_batch_size}"
    yield "the run"
    samples = warmup.samples(training, training.steps)
    yield f"  {'steps':<14}{training.steps:,} = {samples * training.sequence_length:,} tokens"
    if training.token_budget:
        steps = warmup.steps_for_tokens(training, training.token_budget)
        yield f"  {'token budget':<14}{training.token_budget:,} tokens = training.steps={steps}"
    if config.data.blend and config.data.blend_weights == "samples":  # epochs would need the corpora's sizes
        yield "the blend"
        for name, count in zip(sorted(config.data.blend), BlendSchedule(phases(config)).counts(samples).tolist(), strict=True):
            yield f"  {name:<14}{count * training.sequence_length:,} tokens, {100 * count / samples:.2f} %"
