"""What other frameworks do where they differ from this project's engine: kernels, overlap, number formats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pipeline.config.hardware import Hardware
from pipeline.config.layout import Layout
from pipeline.planner import kernel_time
from pipeline.planner.communication import Group, RepeatedCollective, group, reductions
from pipeline.planner.engine_model import EngineModel, PartTime
from pipeline.planner.operations import AttentionCall, Collective, Elementwise, Operation, Product, TracedPart
from pipeline.planner.planned_buckets import PlannedBucket
from pipeline.planner.state_memory import FP32, ModelState, StateFormat, model_state


@dataclass(frozen=True)
class FrameworkModel(EngineModel):
    """The engine of a framework.

    Attributes:
        scores: of attention: `fused` never writes them, `saved` keeps them for the backward pass, `recomputed` computes them again there
            (Korthikanti et al. 2022).
        overlap_tensor: share of the collectives of tensor parallelism that is hidden behind products.
        fp8_products: factor of the rate of the products of the blocks in 8 bits; 0 where they are in 16 bits.
        logits_bytes: of each logit of a micro-batch, which are all in memory.
        gradient_copy: bytes of a 16-bit gradient that is kept beside the accumulated one.
        scaled: loss scaling in fp16: the optimizer has fp32 gradients of its own.
        attention: factor of the rate of the attention kernel; below 1 for kernels that were not written for the GPU.
        elementwise: factor of the bytes of memory-bound kernels; above 1 where fewer of them are fused than in the trace.
        host_us: microseconds that the host needs to launch an operation; they count where a part's kernels are shorter.
        shard_ranks: ranks over which ZeRO 3 shards (hybrid sharding); 0 for all that hold the same weights.
        loss_bytes: bytes that the loss moves for each logit.
        all_reduces: ZeRO 1 reduces gradients in the time of an all-reduce.
        rails: network adapters of a node that a collective of data parallelism uses; 0 for all.
        expert_group: ranks over which experts are spread, and their distance; None for this project's.
    """

    pending: int = 0
    fused_loss: bool = False
    communicators: bool = False
    scores: Literal["fused", "saved", "recomputed"] = "fused"
    overlap_tensor: float = 0.0
    fp8_products: float = 0.0
    logits_bytes: int = 6
    gradient_copy: int = 0
    scaled: bool = False
    attention: float = 1.0
    elementwise: float = 1.0
    host_us: float = 0.0
    shard_ranks: int = 0
    loss_bytes: float = 10.0
    all_reduces: bool = False
    rails: int = 0
    expert_group: tuple[int, int] | None = None

    def axis_groups(self, layout: Layout, hardware: Hardware) -> dict[str, Group]:
        """Return the groups of ranks of every axis; with hybrid sharding, `replicas` have the same partition of dense weights."""
        groups, node = super().axis_groups(layout, hardware), hardware.gpus_per_node
        if self.shard_ranks:
            replicas = groups["dense"].ranks // self.shard_ranks
            groups["dense"] = group(self.shard_ranks, layout.tensor, node)
            groups["replicas"] = group(max(1, replicas), layout.tensor * self.shard_ranks, node)
        if self.expert_group:
            groups["expert"] = group(*self.expert_group, node)
        return {**groups, "dense": replace(groups["dense"], rails=self.rails)}

    def operations(self, part: TracedPart) -> list[Operation]:
        """Return the operations of a part; the loss of the head is the framework's."""
        if part.name != "head":
            return part.operations
        others: list[Operation] = [operation for operation in part.operations if not isinstance(operation, Elementwise)]
        # Not fused further: the factor of the other memory-bound kernels does not apply.
        moved = self.loss_bytes * _logits(part) / self.elementwise
        return [*others, Elementwise("loss", "forward", moved / 2), Elementwise("loss", "backward", moved / 2)]

    def attention_time(self, call: AttentionCall, hardware: Hardware) -> float:
        """Return the seconds of an attention call, without the exchange of keys and values."""
        kernel = kernel_time.attention_time if self.scores == "fused" else _unfused_attention
        time = kernel(call, hardware) / self.attention
        if self.scores == "recomputed" and call.phase == "backward":
            time += _unfused_attention(replace(call, phase="recompute"), hardware)
        return time

    def operation_time(self, operation: Operation, hardware: Hardware, groups: dict[str, Group]) -> tuple[str, float]:
        """Return the cause and the seconds of an operation."""
        if isinstance(operation, Product) and self.fp8_products and operation.name.startswith("blocks"):
            cause, time = super().operation_time(replace(operation, bytes_per_element=1), hardware, groups)
            return cause, time / self.fp8_products
        if isinstance(operation, Elementwise):
            operation = replace(operation, bytes=operation.bytes * self.elementwise)
        cause, time = super().operation_time(operation, hardware, groups)
        return cause, time * (1 - self.overlap_tensor) if isinstance(operation, Collective) and cause == "tensor" else time

    def part_time(self, part: TracedPart, hardware: Hardware, groups: dict[str, Group]) -> PartTime:
        """Return the seconds of a part by cause, with the time for which the GPU waits for the host."""
        result = super().part_time(part, hardware, groups)
        for forward, side in ((True, result.forward), (False, result.backward)):
            launched = self.host_us * 1e-6 * sum((operation.phase == "forward") == forward for operation in self.operations(part))
            if (waiting := launched - sum(side.values())) > 0:
                side["host"] = waiting
        return result

    def reductions(self, buckets: list[PlannedBucket], layout: Layout, zero_stage: int) -> list[RepeatedCollective]:
        """Return the reductions of gradients in a step of ZeRO 0 to 2."""
        return super().reductions(buckets, layout, 0 if self.all_reduces else zero_stage)

    def sharded_exchanges(self, buckets: list[PlannedBucket], layout: Layout) -> list[RepeatedCollective]:
        """Return the gatherings and reductions in a step of ZeRO 3; hybrid sharding sums the partitions of the last micro-batch."""
        exchanges = super().sharded_exchanges(buckets, layout)
        if self.shard_ranks:
            reduced = [reduction.collective for reduction in reductions(buckets, layout, 3, self.gradient_bytes, self.reduce_bytes)]
            sums = [replace(c, kind="all_reduce", axis="replicas", bytes=c.bytes / self.shard_ranks) for c in reduced]
            exchanges += [RepeatedCollective(collective, 1) for collective in sums]
        return exchanges

    def model_state(self, buckets: list[PlannedBucket], state_format: StateFormat) -> ModelState:
        """Return the bytes of weights, gradients and optimizer state."""
        hybrid = [replace(b, ranks=self.shard_ranks) if self.shard_ranks and b.axis == "dense" else b for b in buckets]
        scaled = replace(state_format, state_bytes=state_format.state_bytes + FP32 * self.scaled)
        state = model_state(hybrid, scaled, gradient_bytes=self.gradient_bytes)
        return replace(state, gradients=state.gradients + self.gradient_copy * sum(bucket.elements for bucket in buckets))

    def saved_bytes(self, part: TracedPart) -> float:
        """Return the bytes that a part keeps for its backward pass; with unfused attention also scores, probabilities and a mask."""
        if part.name == "head":  # without this project's fused loss, which saves the gradient of its weight
            return sum(2.0 * p.m * p.k for p in part.products if p.phase == "forward" and p.name)
        recomputes = any(operation.phase == "recompute" for operation in part.operations if isinstance(operation, AttentionCall))
        return part.saved + (_scores_bytes(part) if self.scores == "saved" and not recomputes else 0.0)

    def transient_bytes(self, part: TracedPart) -> tuple[float, float]:
        """Return the most bytes that a part allocates besides what it saves, in its forward and in its backward pass."""
        if part.name == "head":
            return 0.0, _logits(part) * self.logits_bytes
        scores = 0.0 if self.scores == "fused" else _scores_bytes(part)
        return part.peaks[0] + scores, part.peaks[1] + scores


def _scores_bytes(part: TracedPart) -> float:
    """Bytes of scores and probabilities (16 bits each) and a dropout mask (8 bits) of the attention of a part's forward pass."""
    calls = [operation for operation in part.operations if isinstance(operation, AttentionCall) and operation.phase == "forward"]
    return sum(5.0 * call.batch * call.heads * call.queries * call.keys for call in calls)


def _logits(part: TracedPart) -> float:
    """Number of logits of a micro-batch of a head."""
    return float(sum(p.m * p.n for p in part.products if p.phase == "forward" and p.name))


#: Passes over the scores in memory besides those of the products: softmax with mask and dropout, and their backward pass.
UNFUSED_PASSES = {"forward": 4.5, "recompute": 4.5, "backward": 5.5}


def _unfused_attention(call: AttentionCall, hardware: Hardware) -> float:
    """Seconds of two batched products over all pairs, in the backward pass four, with the scores in memory between them."""
    count = 4 if call.phase == "backward" else 2
    product = Product("", call.phase, call.queries, call.keys * call.ring, call.head_dim, call.batch * call.heads, call.bytes_per_element)
    scores = call.batch * call.heads * call.queries * call.keys * call.ring * call.bytes_per_element
    passes = scores * UNFUSED_PASSES[call.phase] / kernel_time.memory_rate(hardware)
    return count * kernel_time.product_time(product, hardware)[0] + passes + 2 * hardware.kernel_us * 1e-6
