"""Time and memory of a training step on given hardware, from the traced operations of a rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pipeline.config.hardware import Hardware
from pipeline.config.layout import Layout
from pipeline.planner import kernels
from pipeline.planner.network import Group, collective_time, group
from pipeline.planner.operations import AttentionCall, Collective, Kind, Operation, Part, Product
from pipeline.planner.schedule import StageTime, simulate
from pipeline.planner.trace import Trace

#: Bytes that CUDA, NCCL and the libraries of matrix products allocate on a GPU.
CONTEXT_BYTES = 1.6e9
#: Share of the activations that the caching allocator loses to fragmentation.
FRAGMENTATION = 0.06
#: Bytes of the optimizer step for each weight: weight, gradient and two moments read, master weight and moments written, weight written.
OPTIMIZER_BYTES = 30


@dataclass(frozen=True)
class Practice:
    """What an engine does; the defaults are this project's on GPUs.

    Attributes:
        flash: fused attention; otherwise the scores are in memory.
        recompute_scores: with unfused attention, recompute the scores in the backward pass (Korthikanti et al. 2022).
        overlap_data: share of the compute during which collectives of data parallelism run beside it.
        overlap_tensor: share of the collectives of tensor parallelism that is hidden behind products.
        fp8: products of the blocks in 8 bits.
        logits_bytes: of each logit of a micro-batch, which are all in memory; 0 for this project's fused loss.
        gradient_copy: bytes of a 16-bit gradient that is kept beside the accumulated one.
        gradient_bytes: of an accumulated gradient, and of a gradient in a collective.
        optimizer_gathers: weights are gathered after the step of a sharded optimizer.
        products: factor of the rate of matrix products; below 1 where collectives beside them take multiprocessors and power.
        attention: factor of the rate of the attention kernel; below 1 for kernels that were not written for the GPU.
        elementwise: factor of the bytes of memory-bound kernels; above 1 where fewer of them are fused than in the trace.
        host_us: microseconds that the host needs to launch an operation; they count where a part's kernels are shorter.
        shard_ranks: ranks over which ZeRO 3 shards (hybrid sharding); 0 for all that hold the same weights.
    """

    flash: bool = True
    recompute_scores: bool = False
    overlap_data: float = 0.9
    overlap_tensor: float = 0.0
    fp8: bool = False
    logits_bytes: int = 0
    gradient_copy: int = 0
    gradient_bytes: int = 4
    optimizer_gathers: bool = True
    products: float = 1.0
    attention: float = 1.0
    elementwise: float = 1.0
    host_us: float = 0.0
    shard_ranks: int = 0


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
class Memory:
    """Bytes of the fullest rank at its peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    transient: float
    overhead: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.transient + self.overhead


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
    *,
    zero_stage: int,
    weight_bytes: int = 2,
    state_tensors: int = 2,
    hidden_bytes: float,
    practice: Practice | None = None,
) -> Estimate:
    """Predict the time and memory of a step.

    Args:
        trace: operations of a micro-batch on a rank.
        layout: of the job.
        hardware: GPU, node and network.
        zero_stage: 0 to 3.
        weight_bytes: of a weight in matrix products.
        state_tensors: fp32 tensors of the optimizer for each weight.
        hidden_bytes: of the activations that a pipeline stage sends for a micro-batch.
        practice: what the engine does.
    """
    practice = practice or Practice()
    groups = axis_groups(layout, hardware, practice.shard_ranks)
    times = {name: part_time(part, hardware, groups, practice) for name, part in trace.parts.items()}
    contents = [stage_parts(trace, layout, stage) for stage in range(layout.stage_count)]
    accumulate = [_accumulation(parts, hardware, practice) for parts in contents]
    stages = [_stage_time(parts, times, extra) for parts, extra in zip(contents, accumulate, strict=True)]
    sharded = [_gathering(parts, hardware, groups, practice, stage) for parts, stage in zip(contents, stages, strict=True)]
    if zero_stage == 3:
        stages = [replace(s, forward=s.forward + e, backward=s.backward + 2 * e) for s, e in zip(stages, sharded, strict=True)]
    send = collective_time("send", hidden_bytes, groups["pipeline"], hardware) if layout.pipeline > 1 else 0.0
    saved = [sum(_saved(part, practice) for part in parts) for parts in contents]
    run, flight = simulate(layout, stages, lambda _: send, saved)
    exposed = max(_reduction(rank, contents, stages, layout, hardware, groups, practice, zero_stage) for rank in range(layout.pipeline))
    optimizer = max(_optimizer(rank, contents, layout, hardware, zero_stage) for rank in range(layout.pipeline))
    step = run + exposed + optimizer
    memories = [
        _memory(rank, contents, flight[rank], layout, zero_stage, weight_bytes, state_tensors, practice) for rank in range(layout.pipeline)
    ]
    fullest = max(range(layout.pipeline), key=lambda rank: memories[rank].total)
    busiest = max(range(layout.pipeline), key=lambda rank: sum(stages[s].forward + stages[s].backward for s in layout.stages(rank)))
    causes = _causes(layout, contents, times, busiest)
    work = layout.micro_batches * sum(stages[s].forward + stages[s].backward for s in layout.stages(busiest))
    causes["gradient accumulation"] = layout.micro_batches * sum(accumulate[s] for s in layout.stages(busiest))
    if zero_stage == 3:
        causes["data"] = layout.micro_batches * 3 * sum(sharded[s] for s in layout.stages(busiest))
    causes["bubble"] = max(0.0, run - work)
    causes["data"] = causes.get("data", 0.0) + exposed
    causes["optimizer"] = optimizer
    flops = sum(
        operation.flops
        for parts in contents
        for part in parts
        for operation in part.operations
        if isinstance(operation, Product | AttentionCall) and operation.phase != "recompute"
    )
    replicas = layout.world_size // layout.pipeline * layout.micro_batches
    fits = memories[fullest].total <= hardware.memory_gb * 1e9
    return Estimate(step, causes, memories[fullest], fullest, fits, times, flops * replicas)


def axis_groups(layout: Layout, hardware: Hardware, shard_ranks: int = 0) -> dict[str, Group]:
    """Return the groups of ranks of every axis; `dense` shards the same dense weights, `data` the same experts."""
    node, inner = hardware.gpus_per_node, layout.tensor * layout.context
    return {
        "tensor": group(layout.tensor, 1, node),
        "context": group(layout.context, layout.tensor, node),
        "expert": group(layout.expert, inner, node),
        "dense": group(shard_ranks or layout.context * layout.expert * layout.data, layout.tensor, node),
        "data": group(layout.context * layout.data, layout.tensor if layout.expert == 1 else inner * layout.expert, node),
        "pipeline": group(layout.pipeline, layout.world_size // layout.pipeline, node),
    }


def stage_parts(trace: Trace, layout: Layout, stage: int) -> list[Part]:
    """Return the parts of a pipeline stage."""
    parts = [trace.block(index) for index in layout.layers(stage, len(trace.kinds))]
    first, last = stage == 0, stage == layout.stage_count - 1
    return [*([trace.parts["embed"]] if first else []), *parts, *([trace.parts["head"]] if last else [])]


def operation_time(operation: Operation, hardware: Hardware, groups: dict[str, Group], practice: Practice) -> tuple[str, float]:
    """Return the cause and the seconds of an operation."""
    if isinstance(operation, Product):
        if practice.fp8 and operation.name.startswith("blocks"):
            operation = replace(operation, bytes_per_element=1)
        return "products", kernels.product_time(operation, hardware)[0] / practice.products
    if isinstance(operation, AttentionCall):
        time = kernels.attention_time(operation, hardware, fused=practice.flash) / practice.attention
        if not practice.flash and practice.recompute_scores and operation.phase == "backward":
            time += kernels.attention_time(replace(operation, phase="recompute"), hardware, fused=False)
        if operation.ring > 1:  # keys and values are sent while the previous ones are used
            moved = (operation.head_dim + operation.value_dim) * operation.kv_heads * operation.keys * operation.batch
            size = moved * (operation.ring - 1) * operation.bytes_per_element * (3 if operation.phase == "backward" else 1)
            time = max(time, collective_time("send", size, groups["context"], hardware))
        return "attention", time
    if isinstance(operation, Collective):
        time = collective_time(operation.kind, operation.bytes, groups[operation.axis], hardware)
        return operation.axis, time * (1 - practice.overlap_tensor if operation.axis == "tensor" else 1)
    return "elementwise", kernels.elementwise_time(operation.bytes * practice.elementwise, hardware)


def part_time(part: Part, hardware: Hardware, groups: dict[str, Group], practice: Practice) -> PartTime:
    """Return the seconds of a part by cause."""
    result = PartTime()
    for operation in part.operations:
        cause, time = operation_time(operation, hardware, groups, practice)
        side = result.forward if operation.phase == "forward" else result.backward
        side[cause] = side.get(cause, 0.0) + time
    for forward, side in ((True, result.forward), (False, result.backward)):
        launched = practice.host_us * 1e-6 * sum((operation.phase == "forward") == forward for operation in part.operations)
        if (waiting := launched - sum(side.values())) > 0:
            side["host"] = waiting
    return result


def _stage_time(parts: list[Part], times: dict[str, PartTime], accumulate: float) -> StageTime:
    forward = sum(sum(times[part.name].forward.values()) for part in parts)
    backward = sum(sum(times[part.name].backward.values()) for part in parts) + accumulate
    # Half of the products of the backward pass compute gradients of weights.
    weights = sum(times[part.name].backward.get("products", 0.0) for part in parts) / 2 + accumulate
    return StageTime(forward, backward - weights, backward)


def _accumulation(parts: list[Part], hardware: Hardware, practice: Practice) -> float:
    """Seconds to add the 16-bit gradients of a micro-batch to their sum."""
    return kernels.elementwise_time((2 + 2 * practice.gradient_bytes) * sum(part.parameters for part in parts), hardware)


def _over_data(kind: Kind, parts: list[Part], size: float, hardware: Hardware, groups: dict[str, Group]) -> float:
    """Seconds of a collective over the weights of some parts, `size` bytes each; every part is a bucket."""
    total = 0.0
    for part in parts:
        dense = part.matrices + part.vectors
        if dense:
            total += collective_time(kind, size * dense, groups["dense"], hardware)
        if part.experts:
            total += collective_time(kind, size * part.experts, groups["data"], hardware)
    return total


def _gathering(parts: list[Part], hardware: Hardware, groups: dict[str, Group], practice: Practice, stage: StageTime) -> float:
    """Exposed seconds of one of the three collectives of ZeRO 3 for a micro-batch: two gathers and a reduction."""
    gather = _over_data("all_gather", parts, 2, hardware, groups)
    reduce = _over_data("reduce_scatter", parts, practice.gradient_bytes, hardware, groups)
    hidden = practice.overlap_data * (stage.forward + stage.backward)
    return max(0.0, 2 * gather + reduce - hidden) / 3


def _reduction(
    rank: int,
    contents: list[list[Part]],
    stages: list[StageTime],
    layout: Layout,
    hardware: Hardware,
    groups: dict[str, Group],
    practice: Practice,
    zero_stage: int,
) -> float:
    """Exposed seconds of the collectives of data parallelism in a step."""
    if zero_stage == 3:
        return 0.0
    held = [part for stage in layout.stages(rank) for part in contents[stage]]
    kind: Kind = "all_reduce" if zero_stage == 0 else "reduce_scatter"
    reduce = _over_data(kind, held, practice.gradient_bytes, hardware, groups)
    forward = sum(stages[stage].forward for stage in layout.stages(rank))
    backward = sum(stages[stage].backward for stage in layout.stages(rank))
    largest = max(held, key=lambda part: part.parameters)
    last_bucket = _over_data(kind, [largest], practice.gradient_bytes, hardware, groups)
    rounds = layout.micro_batches if zero_stage == 2 else 1
    exposed = rounds * max(min(reduce, last_bucket) if practice.overlap_data else reduce, reduce - practice.overlap_data * backward)
    if zero_stage >= 1 and practice.optimizer_gathers:
        gather = _over_data("all_gather", held, 2, hardware, groups)
        exposed += max(0.0, gather - practice.overlap_data * forward)
    return exposed


def _optimizer(rank: int, contents: list[list[Part]], layout: Layout, hardware: Hardware, zero_stage: int) -> float:
    """Seconds of the optimizer step."""
    held = [part for stage in layout.stages(rank) for part in contents[stage]]
    dense, experts = float(sum(part.matrices + part.vectors for part in held)), float(sum(part.experts for part in held))
    if zero_stage:
        dense, experts = dense / (layout.data * layout.expert * layout.context), experts / (layout.data * layout.context)
    return kernels.elementwise_time(OPTIMIZER_BYTES * (dense + experts), hardware)


def _saved(part: Part, practice: Practice) -> float:
    """Bytes that a part keeps for its backward pass; with unfused attention also scores, probabilities and a mask."""
    extra = 0.0
    recomputes = any(operation.phase == "recompute" for operation in part.operations if isinstance(operation, AttentionCall))
    if not practice.flash and not practice.recompute_scores and not recomputes:
        extra = scores_bytes(part)
    if practice.logits_bytes and part.name == "head":  # without this project's fused loss, which saves the gradient of its weight
        return sum(2.0 * p.m * p.k for p in part.products if p.phase == "forward" and p.name)
    return part.saved + extra


def _transient(part: Part, practice: Practice) -> float:
    """Bytes that a part allocates at most besides what it saves."""
    if practice.logits_bytes and part.name == "head":
        return logits_of(part) * practice.logits_bytes
    return part.peak + (0.0 if practice.flash else scores_bytes(part))


def scores_bytes(part: Part) -> float:
    """Bytes of scores and probabilities (16 bits each) and a dropout mask (8 bits) of the attention calls of a part's forward pass."""
    calls = [operation for operation in part.operations if isinstance(operation, AttentionCall) and operation.phase == "forward"]
    return sum(5.0 * call.batch * call.heads * call.queries * call.keys for call in calls)


def logits_of(part: Part) -> float:
    """Number of logits of a micro-batch of a head."""
    return float(sum(p.m * p.n for p in part.products if p.phase == "forward" and p.name))


def _memory(
    rank: int,
    contents: list[list[Part]],
    flight: float,
    layout: Layout,
    zero_stage: int,
    weight_bytes: int,
    state_tensors: int,
    practice: Practice,
) -> Memory:
    """Bytes of a pipeline rank at its peak, in the backward pass of the first micro-batch with all others in flight."""
    held = [part for stage in layout.stages(rank) for part in contents[stage]]
    matrices, vectors, experts = (float(sum(getattr(part, name) for part in held)) for name in ("matrices", "vectors", "experts"))
    dense_ranks = practice.shard_ranks or layout.data * layout.expert * layout.context
    expert_ranks = layout.data * layout.context
    whole = matrices + vectors + experts
    share = (matrices + vectors) / dense_ranks + experts / expert_ranks
    master = 0 if zero_stage == 0 and weight_bytes == 4 else 4
    weights = vectors + (matrices if dense_ranks == 1 else 0) + (experts if expert_ranks == 1 else 0) if zero_stage == 3 else whole
    largest = max((part.parameters for part in held), default=0)
    transient = max((_transient(part, practice) for part in held), default=0.0)
    if zero_stage == 3:  # weights of two blocks, and the flat gradients of a block and, in this engine, of two reductions
        reductions = 1 if practice.logits_bytes else 3
        transient += 2 * largest * weight_bytes + reductions * largest * practice.gradient_bytes
    elif zero_stage == 2:
        transient += 3 * largest * 4
    return Memory(
        weights=weights * weight_bytes,
        gradients=(share if zero_stage >= 2 else whole) * practice.gradient_bytes + whole * practice.gradient_copy,
        optimizer=(share if zero_stage else whole) * (master + 4 * state_tensors),
        activations=flight,
        transient=transient,
        overhead=CONTEXT_BYTES + FRAGMENTATION * (flight + transient),
    )


def _causes(layout: Layout, contents: list[list[Part]], times: dict[str, PartTime], rank: int) -> dict[str, float]:
    """Seconds of a step by cause on a rank, while it works."""
    causes: dict[str, float] = {}
    for stage in layout.stages(rank):
        for part in contents[stage]:
            for side in (times[part.name].forward, times[part.name].backward):
                for cause, time in side.items():
                    causes[cause] = causes.get(cause, 0.0) + layout.micro_batches * time
    return causes
