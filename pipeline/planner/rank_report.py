"""What dry_run=true prints: the part of the model, the memory and the batches of one rank of a training job."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config import loss_weights, warmup
from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.data.load.blend import phases, repeated, training_tokens
from pipeline.data.load.blend_schedule import BlendSchedule
from pipeline.data.load.objectives import registry
from pipeline.parallel import mesh
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel, parallelize
from pipeline.planner.flops import count_local_parameters, count_model_parameters, count_primary_parameters
from pipeline.planner.matrix_update import matrix_rounds, update_bytes
from pipeline.planner.plan import JobPlan
from pipeline.planner.planned_buckets import frozen_bytes, planned_buckets
from pipeline.planner.site_correction import factors_text
from pipeline.planner.state_memory import model_state, state_format_of, state_tensors
from pipeline.planner.trace import Trace
from pipeline.training import matrix_rule
from pipeline.training.matrix_rule import MatrixRule

GIB = 1 << 30


def init_fake(config: RunConfig, world_size: int) -> tuple[Mesh, LocalModel]:
    """Return the mesh of rank `dry_run.rank` and its part of the model on the meta device."""
    device = mesh.init_fake(config.dry_run.rank, world_size)
    try:
        local = mesh.build_mesh(Layout.of(config, world_size), device)
        return local, parallelize(config, local)
    finally:
        mesh.destroy_process_group()


def lines(config: RunConfig, local: Mesh, model: LocalModel, traced: Trace) -> Iterator[str]:
    """Yield everything but the plan of the job.

    Args:
        local, model: as init_fake returns them.
        traced: of the configuration.
    """
    yield from rank_lines(config, local.layout)
    yield from stage_lines(config, local, model)
    yield from memory_lines(config, local.layout, traced)
    yield from optimizer_lines(config, model)
    yield from batch_lines(config, local.layout)


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
    yield f"  {factors_text(result.config)}"


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


def memory_lines(config: RunConfig, layout: Layout, traced: Trace) -> Iterator[str]:
    """Yield the size of weights, gradients and optimizer state on the rank; of unequal slices, that of tensor rank 0."""
    zero, stages = config.parallel.zero_stage, layout.stages(layout.coordinates(config.dry_run.rank).pipeline)
    buckets = [bucket for bucket in planned_buckets(traced, layout, stages, zero) if bucket.trained]
    state_format, tensors = state_format_of(config, layout), state_tensors(config)
    state, frozen = model_state(buckets, state_format), frozen_bytes(traced, layout, stages, zero)
    kept = " and ".join(filter(None, [", ".join(tensors[:-1]), tensors[-1]]))
    if config.optimizer.state_dtype != "fp32":
        kept = kept.replace("exp_avg_sq", f"exp_avg_sq in {config.optimizer.state_dtype}")
    if tensors != (fewer := state_tensors(config, muon=True)):
        kept += f" (of the matrices of Muon only {' and '.join(fewer)})"
    (shards, groups), (shards_of_experts, _) = (layout.zero_sizes(experts=experts) for experts in (False, True))
    undivided = zero == 0 or shards == 1
    master = "" if undivided and config.precision.dtype == "fp32" else "master weights and "
    over = f", sharded over {shards} data ranks"
    if layout.expert > 1:
        over += f" (experts: {shards_of_experts})"
    if groups > 1:
        over += f", in {groups} groups"
    yield f"model state under ZeRO {zero} (without activations and buffers)"
    yield f"  {'weights':<16}{(state.weights + frozen) / GIB:9.3f} GiB  {config.precision.dtype}{over if zero == 3 else ''}"
    if frozen:
        in_4_bits = f"linear layers of the blocks in {config.lora.quantize}"
        if zero == 3:
            kind = over if config.lora.quantize == "none" else f"{over}; {in_4_bits}, not sharded"
        else:
            kind = ", not sharded over data ranks" + ("" if config.lora.quantize == "none" else f", {in_4_bits}")
        yield f"  {'  frozen':<16}{frozen / GIB:9.3f} GiB  of these{kind}"
    yield f"  {'gradients':<16}{state.gradients / GIB:9.3f} GiB  fp32{over if zero >= 2 else ''}"
    if state.host:
        yield f"  {'optimizer':<16}{0:9.3f} GiB  offloaded"
        yield f"  {'total':<16}{(state.total + frozen) / GIB:9.3f} GiB"
        yield f"  {'host memory':<16}{state.host / GIB:9.3f} GiB  fp32 {master}{kept}{over}, and buffers of the copies"
        return
    yield f"  {'optimizer':<16}{state.optimizer / GIB:9.3f} GiB  fp32 {master}{kept}{over if zero else ''}"
    yield f"  {'total':<16}{(state.total + frozen) / GIB:9.3f} GiB"
    if update := update_bytes(matrix_rounds(buckets, layout, zero), state_format.weight_bytes):
        yield f"  {'update':<16}{update / GIB:9.3f} GiB  of temporary tensors in the update of Muon, when there are no activations"


def optimizer_lines(config: RunConfig, model: LocalModel) -> Iterator[str]:
    """Yield which weights of the rank Muon updates, as which matrices."""
    rule = MatrixRule.of(config.optimizer, config.model)
    if rule.muon:
        yield "optimizer: weights, how many there are of each, and the matrices of Muon"
        yield from (f"  {line}" for line in matrix_rule.lines(rule, model.pieces.values()))


def batch_lines(config: RunConfig, layout: Layout) -> Iterator[str]:
    """Yield the samples and tokens of a step and of the run."""
    training = config.training
    tokens = training.global_batch_size * training.sequence_length
    yield "a step"
    yield f"  {'sequences':<16}{training.global_batch_size:,} of {training.sequence_length:,} tokens = {tokens:,} tokens"
    yield f"  {'a rank':<16}{layout.micro_batches:,} micro-batches of {training.micro_batch_size}"
    yield "the run"
    samples = warmup.samples(training, training.steps)
    if training.steps:
        yield f"  {'steps':<16}{training.steps:,} = {samples * training.sample_length:,} tokens"
    else:
        yield f"  {'epochs':<16}{training.epochs or warmup.DEFAULT_EPOCHS:g}; the number of steps is logged once the data is packed"
    for name in loss_weights.defaults(config.model):
        yield f"  {f'{name} ':<16}{loss_weights.text(config.model, training, name)}"
    if training.token_budget:
        steps = warmup.steps_for_tokens(training, training.token_budget)
        yield f"  {'token budget':<16}{training.token_budget:,} tokens = training.steps={steps}"
    epoch = training_tokens(config.data) if registry.objective_of(config).data_key == "data.tokens" else {}
    if training.steps and epoch.get(""):
        epochs = samples * training.sample_length / epoch[""]
        yield f"  {'data':<16}{epoch['']:,} tokens, {epochs:.3g} epochs{repeated(epochs)}"
    if config.data.blend and config.data.blend_weights == "samples":  # epochs would require the corpus sizes
        yield "the blend"
        width = max(16, 2 + max(map(len, config.data.blend)))
        for name, count in zip(
            sorted(config.data.blend), BlendSchedule(phases(config.data, training.sample_length)).counts(samples).tolist(), strict=True
        ):
            epochs = count * training.sample_length / epoch[name] if epoch.get(name) else 0.0
            of_corpus = f", {epochs:.3g} epochs of {epoch[name]:,}{repeated(epochs)}" if epochs else ""
            yield f"  {name:<{width}}{count * training.sample_length:,} tokens, {100 * count / samples:.2f} %{of_corpus}"
