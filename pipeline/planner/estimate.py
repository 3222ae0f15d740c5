"""Time and memory of a training step on given hardware, from the traced operations of a rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pipeline.config.hardware import Hardware
from pipeline.config.layout import Layout
from pipeline.planner import kernels
from pipeline.planner.exchange import Bucket, Exchange, buckets, gathers, reductions, stage_parts
from pipeline.planner.memory import StateFormat
from pipeline.planner.network import Group, collective_time, group
from pipeline.planner.operations import AttentionCall, Collective, Elementwise, Operation, Part, Product
from pipeline.planner.practice import Practice
from pipeline.planner.rank_memory import Memory, logits_of, rank_memory, saved_bytes
from pipeline.planner.schedule import StageTime, simulate
from pipeline.planner.trace import Trace

#: Bytes of the optimizer step for each weight: weight, gradient and two moments read, master weight and moments written, weight written.
OPTIMIZER_BYTES = 30
#: Share of the memory of a GPU that a process can use; the driver keeps the rest (79.1 to 79.3 of the 80 GiB of an A100).
USABLE = 0.99


@dataclass(frozen=True)
class Job:
    """Where and how a step runs: layout, hardware, what the engine does, and the groups of ranks of every axis."""

    layout: Layout
    hardware: Hardware
    practice: Practice
    groups: dict[str, Group]


@dataclass
class PartTime:
    """Seconds of one micro-batch in a part of the model, by cause."""

    forward: dict[str, float] = field(default_factory=dict)
    backward: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """Forward and backward pass."""
        return sum(self.forward.values()) + sum(self.backward.values())


@dataclass(frozen=True)
class Estimate:
    """The prediction for a step.

    Attributes:
        step_time: seconds.
        causes: seconds of the step on the slowest rank by cause (products, attention, elementwise, tensor, ..., bubble, data, optimizer).
        memory: of the fullest rank.
        pipeline_rank: the fullest rank's coordinate on the pipeline axis.
        fits: whether the memory of the GPU suffices.
        part_times: by kind of part.
        flops: of products and attention of a step on all ranks, without recomputation.
    """

    step_time: float
    causes: dict[str, float]
    memory: Memory
    pipeline_rank: int
    fits: bool
    part_times: dict[str, PartTime]
    flops: float


def estimate(
    trace: Trace,
    layout: Layout,
    hardware: Hardware,
    kept: StateFormat,
    *,
    hidden_bytes: float,
    practice: Practice | None = None,
) -> Estimate:
    """Predict the time and memory of a step.

    Args:
        trace: operations of a micro-batch on a rank.
        layout: of the job.
        hardware: GPU, node and network.
        kept: how a rank keeps its weights.
        hidden_bytes: of the activations that a pipeline stage sends for a micro-batch.
        practice: what the engine does.
    """
    practice = practice or Practice()
    zero_stage = kept.zero_stage
    job = Job(layout, hardware, practice, axis_groups(layout, hardware, practice))
    times = {name: part_time(part, hardware, job.groups, practice) for name, part in trace.parts.items()}
    contents = [stage_parts(trace, layout, stage) for stage in range(layout.stage_count)]
    held = [buckets(trace, layout, layout.stages(rank)) for rank in range(layout.pipeline)]
    accumulate = [_accumulation(parts, hardware, practice) for parts in contents]
    stages = [_stage_time(parts, times, extra) for parts, extra in zip(contents, accumulate, strict=True)]
    of = [[stages[stage] for stage in layout.stages(rank)] for rank in range(layout.pipeline)]
    compute = [layout.micro_batches * sum(stage.forward + stage.backward for stage in own) for own in of]
    if zero_stage == 3:  # exposed collectives delay every pass of every stage alike
        exposed = [_exposed_sharded(b, c, job) for b, c in zip(held, compute, strict=True)]
        delays = [seconds / layout.micro_batches / layout.stages_per_rank for seconds in exposed]
        stages = [_delayed(stage, delays[layout.holder(index)]) for index, stage in enumerate(stages)]
        after = 0.0
    else:
        exposed = [_exposed(b, own, job, zero_stage) for b, own in zip(held, of, strict=True)]
        after = max(exposed)
    send = collective_time("send", hidden_bytes, job.groups["pipeline"], hardware) if layout.pipeline > 1 else 0.0
    saved = [sum(saved_bytes(part, practice) for part in parts) for parts in contents]
    if practice.keeps_outputs:
        saved = [kept + hidden_bytes * (stage < layout.stage_count - 1) for stage, kept in enumerate(saved)]
    run, flight = simulate(layout, stages, lambda _: send, saved)
    optimizer = max(_optimizer(b, hardware, zero_stage) for b in held)
    memories = [
        rank_memory(held[rank], [contents[stage] for stage in layout.stages(rank)], flight[rank], kept, practice)
        for rank in range(layout.pipeline)
    ]
    fullest = max(range(layout.pipeline), key=lambda rank: memories[rank].total)
    busiest = max(range(layout.pipeline), key=lambda rank: compute[rank])
    causes = _causes(layout, contents, times, busiest)
    causes["gradient accumulation"] = layout.micro_batches * sum(accumulate[stage] for stage in layout.stages(busiest))
    causes["data"] = exposed[busiest] if zero_stage == 3 else after
    causes["bubble"] = max(0.0, run - compute[busiest] - (exposed[busiest] if zero_stage == 3 else 0.0))
    causes["optimizer"] = optimizer
    flops = sum(
        operation.flops
        for parts in contents
        for part in parts
        for operation in part.operations
        if isinstance(operation, Product | AttentionCall) and operation.phase != "recompute"
    )
    replicas = layout.world_size // layout.pipeline * layout.micro_batches
    fits = memories[fullest].total <= USABLE * hardware.memory_gb * 1e9
    return Estimate(run + after + optimizer, causes, memories[fullest], fullest, fits, times, flops * replicas)


def _delayed(stage: StageTime, delay: float) -> StageTime:
    """A stage whose micro-batches take longer: a third in the forward pass (one of three collectives)."""
    return StageTime(stage.forward + delay / 3, stage.backward_inputs + delay * 2 / 3, stage.backward + delay * 2 / 3)


def axis_groups(layout: Layout, hardware: Hardware, practice: Practice | None = None) -> dict[str, Group]:
    """Return the groups of ranks of every axis.

    `dense` shards the same dense weights, `data` the same experts; with hybrid sharding, `replicas` have the same partition of them.
    """
    practice = practice or Practice()
    node, inner = hardware.gpus_per_node, layout.tensor * layout.context
    replicas = layout.context * layout.expert * layout.data
    shards = practice.shard_ranks or replicas
    pipeline = layout.world_size // layout.pipeline
    dense = group(shards, layout.tensor, node)
    return {
        "tensor": group(layout.tensor, 1, node),
        "context": group(layout.context, layout.tensor, node),
        "expert": group(*(practice.expert_group or (layout.expert, inner)), node),
        "dense": replace(dense, rails=practice.rails),
        "replicas": group(max(1, replicas // shards), layout.tensor * shards, node),
        "data": group(layout.context * layout.data, layout.tensor if layout.expert == 1 else inner * layout.expert, node),
        "pipeline": group(layout.pipeline, pipeline, node),
        "tied_embedding": group(2, pipeline * max(1, layout.pipeline - 1), node),
    }


def operation_time(operation: Operation, hardware: Hardware, groups: dict[str, Group], practice: Practice) -> tuple[str, float]:
    """Return the cause and the seconds of an operation."""
    if isinstance(operation, Product):
        if practice.fp8_products and operation.name.startswith("blocks"):
            operation = replace(operation, bytes_per_element=1)
            return "products", kernels.product_time(operation, hardware)[0] / practice.products / practice.fp8_products
        return "products", kernels.product_time(operation, hardware)[0] / practice.products
    if isinstance(operation, AttentionCall):
        time = kernels.attention_time(operation, hardware, fused=practice.scores == "fused") / practice.attention
        if practice.scores == "recomputed" and operation.phase == "backward":
            time += kernels.attention_time(replace(operation, phase="recompute"), hardware, fused=False)
        if operation.ring > 1:  # keys and values are sent while the previous ones are used
            time = max(time, collective_time("send", operation.sent, groups["context"], hardware))
        return "attention", time
    if isinstance(operation, Collective):
        time = collective_time(operation.kind, operation.bytes, groups[operation.axis], hardware)
        return operation.axis, time * (1 - practice.overlap_tensor if operation.axis == "tensor" else 1)
    return "elementwise", kernels.elementwise_time(operation.bytes * practice.elementwise, hardware)


def part_time(part: Part, hardware: Hardware, groups: dict[str, Group], practice: Practice) -> PartTime:
    """Return the seconds of a part by cause."""
    result = PartTime()
    for operation in operations_of(part, practice):
        cause, time = operation_time(operation, hardware, groups, practice)
        side = result.forward if operation.phase == "forward" else result.backward
        side[cause] = side.get(cause, 0.0) + time
    for forward, side in ((True, result.forward), (False, result.backward)):
        launched = practice.host_us * 1e-6 * sum((operation.phase == "forward") == forward for operation in operations_of(part, practice))
        if (waiting := launched - sum(side.values())) > 0:
            side["host"] = waiting
    return result


def operations_of(part: Part, practice: Practice) -> list[Operation]:
    """Return the operations of a part, with the loss of another framework."""
    if part.name != "head" or not practice.loss_bytes:
        return part.operations
    others: list[Operation] = [operation for operation in part.operations if not isinstance(operation, Elementwise)]
    # Not fused further: the factor of the other memory-bound kernels does not apply.
    moved = practice.loss_bytes * logits_of(part) / practice.elementwise
    return [*others, Elementwise("loss", "forward", moved / 2), Elementwise("loss", "backward", moved / 2)]


def _stage_time(parts: list[Part], times: dict[str, PartTime], accumulate: float) -> StageTime:
    forward = sum(sum(times[part.name].forward.values()) for part in parts)
    backward = sum(sum(times[part.name].backward.values()) for part in parts) + accumulate
    # Half of the products of the backward pass compute gradients of weights.
    weights = sum(times[part.name].backward.get("products", 0.0) for part in parts) / 2 + accumulate
    return StageTime(forward, backward - weights, backward)


def _accumulation(parts: list[Part], hardware: Hardware, practice: Practice) -> float:
    """Seconds to add the 16-bit gradients of a micro-batch to their sum."""
    return kernels.elementwise_time(practice.accumulation_bytes * sum(part.parameters for part in parts), hardware)


def _seconds(exchanges: list[Exchange], hardware: Hardware, groups: dict[str, Group]) -> float:
    """Seconds of all repetitions of some collectives."""
    return sum(e.count * collective_time(e.collective.kind, e.collective.bytes, groups[e.collective.axis], hardware) for e in exchanges)


def _exposed_sharded(held: list[Bucket], compute: float, job: Job) -> float:
    """Exposed seconds of the gatherings and reductions of ZeRO 3 in a step, beside `compute` seconds of all micro-batches."""
    reduced = reductions(held, job.layout, 3, job.practice.gradient_bytes)
    exchanges = gathers(held, job.layout, 3, 2) + reduced
    if job.practice.shard_ranks:  # the partitions of the last micro-batch are summed over the replicas
        share = [
            replace(e.collective, kind="all_reduce", axis="replicas", bytes=e.collective.bytes / job.practice.shard_ranks) for e in reduced
        ]
        exchanges += [Exchange(collective, 1) for collective in share]
    return max(0.0, _seconds(exchanges, job.hardware, job.groups) - job.practice.overlap_data * compute)


def _exposed(held: list[Bucket], stages: list[StageTime], job: Job, zero_stage: int) -> float:
    """Exposed seconds of the reductions and gatherings of a step of ZeRO 0 to 2 on a rank with these stages."""
    practice, rounds = job.practice, job.layout.micro_batches if zero_stage == 2 else 1
    each = reductions(held, job.layout, 0 if practice.all_reduces else zero_stage, practice.gradient_bytes)
    reduce = _seconds(each, job.hardware, job.groups)
    last = max((_seconds([e], job.hardware, job.groups) for e in each), default=0.0)  # nothing runs beside the last bucket's
    backward = rounds * sum(stage.backward for stage in stages)
    exposed = max(last, reduce - practice.overlap_data * backward) if practice.overlap_data else reduce
    gather = _seconds(gathers(held, job.layout, zero_stage, 2), job.hardware, job.groups)
    return exposed + max(0.0, gather - practice.overlap_data * sum(stage.forward for stage in stages))


def _optimizer(held: list[Bucket], hardware: Hardware, zero_stage: int) -> float:
    """Seconds of the optimizer step."""
    elements = sum(bucket.elements / (bucket.ranks if zero_stage else 1) for bucket in held)
    return kernels.elementwise_time(OPTIMIZER_BYTES * elements, hardware)


def _causes(layout: Layout, contents: list[list[Part]], times: dict[str, PartTime], rank: int) -> dict[str, float]:
    """Seconds of a step by cause on a rank, while it works."""
    causes: dict[str, float] = {}
    for stage in layout.stages(rank):
        for part in contents[stage]:
            for side in (times[part.name].forward, times[part.name].backward):
                for cause, time in side.items():
                    causes[cause] = causes.get(cause, 0.0) + layout.micro_batches * time
    return causes
