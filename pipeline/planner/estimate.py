"""Time and memory of a training step on given hardware, from the traced operations of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.config.hardware import Hardware
from pipeline.config.layout import Layout
from pipeline.planner import kernel_time
from pipeline.planner.communication import Group, RepeatedCollective, collective_time, gathers
from pipeline.planner.engine_model import EngineModel, PartTime
from pipeline.planner.matrix_update import exchanges, matrix_rounds, products, products_time, update_bytes
from pipeline.planner.operations import AttentionCall, Collective, Product, TracedPart
from pipeline.planner.peak_memory import PeakMemory, peak_memory
from pipeline.planner.pipeline_simulation import StageTime, simulate
from pipeline.planner.planned_buckets import PlannedBucket, frozen_bytes, planned_buckets
from pipeline.planner.state_memory import StateFormat
from pipeline.planner.trace import Trace

#: Bytes of the optimizer step for each weight: weight, gradient and two moments read, master weight and moments written, weight written.
OPTIMIZER_BYTES = 30
#: Likewise of Muon, whose kernels are not fused. Momentum: the gradient divided 8, where the step is applied 8, momentum 12, Nesterov 12,
#: rounded 6; copies to the home and back in 16 bits 16; weight decay 8, the update subtracted 10, the weight rounded 6.
MUON_BYTES = 86
#: Seconds that a second of collectives adds to what runs beside it: they take multiprocessors, memory bandwidth and power. Fitted, together
#: with SHARDED_PRODUCTS, to published runs (tools/study/README.md).
CONTENTION = 0.1
#: Share of the memory of a GPU that a process can use; the driver keeps the rest (79.1 to 79.3 of the 80 GiB of an A100).
USABLE = 0.99


@dataclass(frozen=True)
class Estimate:
    """The prediction for a step.

    Attributes:
        step_time: seconds.
        causes: seconds of the step on the slowest rank by cause (products, attention, elementwise, tensor, ..., bubble, data, optimizer;
            with Muon also matrix exchange and newton-schulz).
        memories: of a rank of each coordinate on the pipeline axis.
        pipeline_rank: the fullest rank's coordinate on the pipeline axis.
        fits: whether the memory of the GPU suffices.
        flops: of products and attention of a step on all ranks, without recomputation.
        host_rate: bytes per second that a rank copies to host memory in a forward pass (activation_checkpointing=offload).
    """

    step_time: float
    causes: dict[str, float]
    memories: list[PeakMemory]
    pipeline_rank: int
    fits: bool
    flops: float
    host_rate: float = 0.0

    @property
    def memory(self) -> PeakMemory:
        """Memory of the fullest rank."""
        return self.memories[self.pipeline_rank]


def estimate(
    trace: Trace, layout: Layout, hardware: Hardware, state_format: StateFormat, *, hidden_bytes: float, engine: EngineModel
) -> Estimate:
    """Predict the time and memory of a step.

    Args:
        trace: operations of a micro-batch on a rank.
        hidden_bytes: of the activations that a pipeline stage sends for a micro-batch.
    """
    zero_stage, ranks = state_format.zero_stage, range(layout.pipeline)
    data_parallel = DataParallelTime(layout, hardware, engine, engine.axis_groups(layout, hardware))
    times = {name: engine.part_time(part, hardware, data_parallel.groups) for name, part in trace.parts.items()}
    contents = [trace.stage_parts(layout, stage) for stage in range(layout.stage_count)]
    buckets = [planned_buckets(trace, layout, layout.stages(rank), zero_stage) for rank in ranks]
    accumulate = [engine.accumulation_time(parts, hardware) for parts in contents]
    stages = [_stage_time(parts, times, extra) for parts, extra in zip(contents, accumulate, strict=True)]
    rank_stages = [[stages[stage] for stage in layout.stages(rank)] for rank in ranks]
    compute = [layout.micro_batches * sum(stage.forward + stage.backward for stage in of_rank) for of_rank in rank_stages]
    if zero_stage == 3:  # exposed collectives delay every pass of every stage alike
        exposed = [data_parallel.exposed_sharded(b, c) for b, c in zip(buckets, compute, strict=True)]
        delays = [seconds / layout.micro_batches / layout.stages_per_rank for seconds in exposed]
        stages = [_delayed(stage, delays[layout.holder(index)]) for index, stage in enumerate(stages)]
        after_passes = 0.0
    else:
        exposed = [data_parallel.exposed(b, of_rank, zero_stage) for b, of_rank in zip(buckets, rank_stages, strict=True)]
        after_passes = max(exposed)
    send = collective_time("send", hidden_bytes, data_parallel.groups["pipeline"], hardware) if layout.pipeline > 1 else 0.0
    saved = [sum(engine.saved_bytes(part) for part in parts) for parts in contents]
    offloaded = [[part.offloaded for part in parts] for parts in contents]
    for stage in range(1, layout.stage_count):  # the first input of a later stage is a buffer that the pipeline keeps
        saved[stage] += offloaded[stage][0]
        offloaded[stage][0] = 0
    inputs = [float(sum(sizes)) for sizes in offloaded]
    pinned = [float(sum(1 << (size - 1).bit_length() for size in sizes if size)) for sizes in offloaded]  # as PyTorch allocates it
    if engine.keeps_outputs:
        saved = [size + (hidden_bytes if stage < layout.stage_count - 1 else 0) for stage, size in enumerate(saved)]
    passes, in_flight = simulate(layout, stages, lambda _: send, saved)
    in_host, rate = [0.0] * layout.pipeline, 0.0
    if any(inputs):
        in_host = simulate(layout, stages, lambda _: send, pinned)[1]
        rate = max(size / stage.forward for size, stage in zip(inputs, stages, strict=True))
    updates = [_update(b, layout, hardware, state_format, data_parallel.groups) for b in buckets]
    optimizer = max(sum(update.values()) for update in updates)
    rounds = [matrix_rounds(b, layout, zero_stage) for b in buckets]
    own_parts = [{stage: contents[stage] for stage in layout.stages(rank)} for rank in ranks]
    frozen = [frozen_bytes(trace, layout, layout.stages(rank), zero_stage) for rank in ranks]
    moved = [engine.step_exchanges(buckets[rank], layout, rank, zero_stage, hidden_bytes, 1, reference=False) for rank in ranks]
    used = [[*_models_collectives(own_parts[rank]), *(repeated.collective for repeated in moved[rank])] for rank in ranks]
    outside = [engine.outside_bytes(collectives, layout, hardware) for collectives in used]
    memories = [
        peak_memory(
            *(buckets[rank], own_parts[rank], in_flight[rank], state_format, engine, frozen[rank]),
            outside=outside[rank],
            host=in_host[rank],
            compiled=trace.compiled,
            update=update_bytes(rounds[rank], state_format.weight_bytes),
        )
        for rank in ranks
    ]
    fullest = max(ranks, key=lambda rank: memories[rank].total)
    busiest = max(ranks, key=lambda rank: compute[rank])
    causes = _causes(layout, contents, times, busiest)
    causes["gradient accumulation"] = layout.micro_batches * sum(accumulate[stage] for stage in layout.stages(busiest))
    causes["data"] = exposed[busiest] if zero_stage == 3 else after_passes
    causes["bubble"] = max(0.0, passes - compute[busiest] - (exposed[busiest] if zero_stage == 3 else 0.0))
    causes |= next(update for update in updates if sum(update.values()) == optimizer)
    reference = reference_time(contents, layout, hardware, engine, send)
    if reference:
        causes["reference"] = reference
    replicas = layout.world_size // layout.pipeline * layout.micro_batches
    fits = memories[fullest].total <= USABLE * hardware.memory_gb * 1e9
    step_time = passes + after_passes + optimizer + reference
    return Estimate(step_time, causes, memories, fullest, fits, _flops(contents) * replicas, rate)


def _models_collectives(stages: dict[int, list[TracedPart]]) -> Iterator[Collective]:
    """Yield the collectives of the model's parts on a pipeline rank."""
    for operation in (operation for parts in stages.values() for part in parts for operation in part.operations):
        if isinstance(operation, Collective):
            yield operation
        elif isinstance(operation, AttentionCall) and operation.ring > 1:
            yield Collective("send", "context", operation.phase, operation.sent)


def reference_time(contents: list[list[TracedPart]], layout: Layout, hardware: Hardware, engine: EngineModel, send: float) -> float:
    """Return the seconds in which the reference model of DPO processes the micro-batches of a step, before the training passes.

    Args:
        send: seconds to send hidden states to the next stage.
    """
    groups = engine.axis_groups(layout, hardware)
    stages = [sum(engine.operation_time(o, hardware, groups)[1] for part in parts for o in part.reference) for parts in contents]
    if not sum(stages):
        return 0.0
    slowest = max(sum(stages[stage] for stage in layout.stages(rank)) for rank in range(layout.pipeline))
    fill = sum(stages) / layout.stages_per_rank - slowest / layout.stages_per_rank + (layout.pipeline - 1) * send
    return layout.micro_batches * slowest + fill


@dataclass(frozen=True)
class DataParallelTime:
    """Exposed time of the collectives of data parallelism: those that do not run beside the computation."""

    layout: Layout
    hardware: Hardware
    engine: EngineModel
    groups: dict[str, Group]

    def exposed_sharded(self, buckets: list[PlannedBucket], compute: float) -> float:
        """Return the exposed seconds of the collectives of ZeRO 3 in a step, beside `compute` seconds of all micro-batches."""
        seconds = self._seconds(self.engine.sharded_exchanges(buckets, self.layout))
        beside = min(seconds, self.engine.overlap_data * compute)
        return seconds - beside + CONTENTION * beside

    def exposed(self, buckets: list[PlannedBucket], stages: list[StageTime], zero_stage: int) -> float:
        """Return the exposed seconds of the reductions and gatherings of a step of ZeRO 0 to 2 on a rank with these stages."""
        overlap, beside = self.engine.overlap_data, self._passes_beside()
        rounds = self.layout.micro_batches if zero_stage == 2 else beside
        reductions = self.engine.reductions(buckets, self.layout, zero_stage)
        last = max((self._seconds([reduction]) for reduction in reductions), default=0.0)  # nothing runs beside the last bucket's
        backward = rounds * sum(stage.backward for stage in stages)
        forward = beside * sum(stage.forward for stage in stages)
        reduce = self._seconds(reductions)
        gather = self._seconds(gathers(buckets, self.layout, zero_stage, self.engine.weight_bytes))
        contended = CONTENTION * (min(reduce, overlap * backward) + min(gather, overlap * forward))
        return max(last, reduce - overlap * backward) + max(0.0, gather - overlap * forward) + contended

    def _passes_beside(self) -> float:
        """Number of passes through all stages of a rank beside which its reductions run, and its gatherings.

        That is the pass of the last, and the first, micro-batch. An interleaved schedule ends with a round of as many micro-batches as
        ranks through each stage: stages that are done are reduced beside the passes of the others.
        """
        layout = self.layout
        if layout.schedule != "interleaved":
            return 1.0
        return max(1.0, min(layout.pipeline, layout.micro_batches) * (1 - 1 / layout.stages_per_rank))

    def _seconds(self, collectives: list[RepeatedCollective]) -> float:
        """Seconds of all repetitions of some collectives. Sums over groups of ZeRO run beside those in groups, if these are on a node."""
        seconds = {False: 0.0, True: 0.0}
        for repeated in collectives:
            collective = repeated.collective
            axis, _, group = collective.axis.partition("_")
            over_groups = group == "replicas" and self.groups[f"{axis}_shards"].nodes == 1
            time = collective_time(collective.kind, collective.bytes, self.groups[collective.axis], self.hardware)
            seconds[over_groups] += repeated.count * time
        return max(seconds.values())


def _stage_time(parts: list[TracedPart], times: dict[str, PartTime], accumulate: float) -> StageTime:
    forward = sum(sum(times[part.name].forward.values()) for part in parts)
    backward = sum(sum(times[part.name].backward.values()) for part in parts) + accumulate
    products = sum(times[part.name].backward.get("products", 0.0) for part in parts)
    if any(weights.stored for part in parts for weights in part.weights):  # few gradients of weights: the rest are those of inputs
        weights = max(0.0, products - sum(times[part.name].forward.get("products", 0.0) for part in parts)) + accumulate
    else:  # half of the products of the backward pass compute gradients of weights
        weights = products / 2 + accumulate
    return StageTime(forward, backward - weights, backward)


def _delayed(stage: StageTime, delay: float) -> StageTime:
    """A stage whose micro-batches take longer: a third in the forward pass (one of three collectives)."""
    return StageTime(stage.forward + delay / 3, stage.backward_inputs + delay * 2 / 3, stage.backward + delay * 2 / 3)


def _update(
    buckets: list[PlannedBucket], layout: Layout, hardware: Hardware, state_format: StateFormat, groups: dict[str, Group]
) -> dict[str, float]:
    """Seconds of the optimizer step by cause. Nothing else runs beside it."""
    held = [(b, b.elements / (b.ranks if state_format.zero_stage else 1)) for b in buckets if b.trained]
    moved = sum(elements * (MUON_BYTES if bucket.muon else OPTIMIZER_BYTES) for bucket, elements in held)
    seconds = {"optimizer": kernel_time.elementwise_time(moved, hardware)}
    if matrices := matrix_rounds(buckets, layout, state_format.zero_stage):
        sent = exchanges(matrices, state_format.weight_bytes)
        seconds["matrix exchange"] = sum(collective_time(c.kind, c.bytes, groups[c.axis], hardware) for c in sent)
        seconds["newton-schulz"] = products_time(products(matrices, state_format, hardware), hardware)
    return seconds


def _causes(layout: Layout, contents: list[list[TracedPart]], times: dict[str, PartTime], rank: int) -> dict[str, float]:
    """Seconds of a step by cause on a rank, while it works."""
    causes: dict[str, float] = {}
    for stage in layout.stages(rank):
        for part in contents[stage]:
            for side in (times[part.name].forward, times[part.name].backward):
                for cause, time in side.items():
                    causes[cause] = causes.get(cause, 0.0) + layout.micro_batches * time
    return causes


def _flops(contents: list[list[TracedPart]]) -> float:
    """FLOPs of products and attention of a micro-batch on the ranks of one pipeline, without recomputation."""
    return sum(
        operation.flops
        for parts in contents
        for part in parts
        for operation in (*part.operations, *part.reference)
        if isinstance(operation, Product | AttentionCall) and operation.phase != "recompute"
    )
