"""What the planner assumes of the training engine: constants that are documented here, and the time and memory of its operations.

`tools/study` overrides the methods for other frameworks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.config.hardware import Hardware
from pipeline.config.layout import Layout
from pipeline.planner import kernel_time, ring_formula
from pipeline.planner.communication import Group, RepeatedCollective, collective_time, gathers, group, reductions, sends
from pipeline.planner.matrix_update import exchanges, matrix_rounds
from pipeline.planner.operations import AttentionCall, Collective, Operation, Product, TracedPart
from pipeline.planner.planned_buckets import PlannedBucket
from pipeline.planner.state_memory import ModelState, StateFormat, model_state
from pipeline.training.gradient_reduction import MAX_PENDING

#: Rate of matrix products beside the collectives of ZeRO 3, which take multiprocessors and power, over their rate alone. Fitted to
#: published runs (tools/study/README.md).
SHARDED_PRODUCTS = 0.85

#: Bytes of a communicator of NCCL whose ranks share nodes, with two of them and with more (4 x A100, https://github.com/NVIDIA/nccl/issues/964).
COMMUNICATOR = 544e6, 688e6
#: Bytes of a communicator with one rank a node, whose channels are those of a network adapter: 4 of the about 24 of the one above.
NETWORK_COMMUNICATOR = 115e6
#: Bytes of the channels to another GPU of the node for all-to-all, send and receive: a seventh of what the first all-to-all of 8 x H100
#: takes (https://github.com/NVIDIA/nccl/issues/1685).
PEER = (4.34e9 - 1.06e9) / 7


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
class EngineModel:
    """This project's engine on GPUs.

    Attributes:
        products: factor of the rate of matrix products; below 1 where collectives beside them take multiprocessors and power.
        overlap_data: share of the compute during which collectives of data parallelism run beside it.
        gradient_bytes: of an accumulated gradient.
        reduce_bytes: of a gradient that is sent to be summed over the ranks that shard it.
        accumulation_bytes: bytes that the accumulation of gradients moves for each weight and micro-batch.
        weight_bytes: of a gathered weight.
        context_bytes: what CUDA, its libraries, and NCCL without communicators take on a GPU (8 x H100, the issue of PEER).
        communicators: whether those of the step come to this.
        keeps_outputs: a pipeline stage keeps the output of every micro-batch in flight, as PyTorch's schedules do.
        pending: whole gradients of buckets whose reductions are in flight under ZeRO 2 and 3, besides those that are being filled.
        fused_loss: the forward pass of the head saves the fp32 gradient of its weight, and no other one is allocated.
    """

    products: float = 1.0
    overlap_data: float = 0.9
    gradient_bytes: int = 4
    reduce_bytes: int = 4
    accumulation_bytes: float = 10.0
    weight_bytes: int = 2
    context_bytes: float = 1.06e9
    communicators: bool = True
    keeps_outputs: bool = True
    pending: int = MAX_PENDING
    fused_loss: bool = True

    def axis_groups(self, layout: Layout, hardware: Hardware) -> dict[str, Group]:
        """Return the groups of ranks of every axis: `dense` holds the same dense weights, `data` the same experts.

        With parallel.zero_group, ZeRO shards over `dense_shards` and `data_shards`, and `..._replicas` have the same partitions.
        """
        node, inner = hardware.gpus_per_node, layout.tensor * layout.context
        pipeline = layout.world_size // layout.pipeline
        groups = {
            "tensor": group(layout.tensor, 1, node),
            "context": group(layout.context, layout.tensor, node),
            "expert": group(layout.expert, inner, node) if not layout.folded else _folded(layout, node),
            "dense": group(layout.context * layout.expert * layout.data, layout.tensor, node),
            "data": group(layout.context * layout.data, layout.tensor if layout.expert == 1 else inner * layout.expert, node),
            "pipeline": group(layout.pipeline, pipeline, node),
            "tied_embedding": group(2, pipeline * max(1, layout.pipeline - 1), node),
        }
        if layout.zero_block is not None:
            data, _, context = layout.zero_block
            (dense, copies), (experts, copies_of_experts) = layout.zero_sizes(experts=False), layout.zero_sizes(experts=True)
            apart = layout.tensor * context if context < layout.context else inner * layout.expert * data
            groups |= {
                "dense_shards": group(dense, layout.tensor, node),
                "dense_replicas": group(copies, layout.tensor * dense, node),
                "data_shards": group(experts, layout.tensor if layout.expert == 1 or data == 1 else inner * layout.expert, node),
                "data_replicas": group(copies_of_experts, apart, node),
            }
        return groups

    def outside_bytes(self, collectives: Iterable[Collective], layout: Layout, hardware: Hardware) -> float:
        """Return what CUDA and the communicators of the collectives of a step take beside PyTorch's allocator.

        The groups of dense weights and of experts are one communicator without expert parallelism. Neighbors on the pipeline axis, and in
        the ring of context parallelism, are at most two GPUs of the node.
        """
        groups, total = self.axis_groups(layout, hardware), self.context_bytes
        used: dict[str, set[str]] = {}
        for collective in collectives:
            axis = collective.axis.replace("data", "dense") if layout.expert == 1 else collective.axis
            used.setdefault(axis, set()).add(collective.kind)
        for axis, kinds in used.items() if self.communicators else ():
            peers = min(groups[axis].ranks, groups[axis].per_node) - 1
            if kinds - {"send", "all_to_all"}:
                total += COMMUNICATOR[min(peers, 2) - 1] if peers else NETWORK_COMMUNICATOR
            total += PEER * (peers if "all_to_all" in kinds else min(peers, 2) if "send" in kinds else 0)
        return total

    def operations(self, part: TracedPart) -> list[Operation]:
        """Return the operations that a part executes."""
        return part.operations

    def attention_time(self, call: AttentionCall, hardware: Hardware) -> float:
        """Return the seconds of an attention call, without the exchange of keys and values."""
        time = 0.0 if ring_formula.is_unfused(call) else kernel_time.attention_time(call, hardware)
        if ring_formula.runs_formula(call):
            time += sum(count * self.operation_time(operation, hardware, {})[1] for operation, count in ring_formula.work(call).operations)
        return time

    def operation_time(self, operation: Operation, hardware: Hardware, groups: dict[str, Group]) -> tuple[str, float]:
        """Return the cause and the seconds of an operation."""
        if isinstance(operation, Product):
            return "products", kernel_time.product_time(operation, hardware)[0] / self.products
        if isinstance(operation, AttentionCall):
            time = self.attention_time(operation, hardware)
            if operation.ring > 1:  # keys and values are sent while the previous ones are used
                time = max(time, collective_time("send", operation.sent, groups["context"], hardware))
            return "attention", time
        if isinstance(operation, Collective):
            return operation.axis, collective_time(operation.kind, operation.bytes, groups[operation.axis], hardware)
        return "elementwise", kernel_time.elementwise_time(operation.bytes, hardware)

    def part_time(self, part: TracedPart, hardware: Hardware, groups: dict[str, Group]) -> PartTime:
        """Return the seconds of a part by cause."""
        result = PartTime()
        for operation in self.operations(part):
            cause, time = self.operation_time(operation, hardware, groups)
            side = result.forward if operation.phase == "forward" else result.backward
            side[cause] = side.get(cause, 0.0) + time
        return result

    def accumulation_time(self, parts: list[TracedPart], hardware: Hardware) -> float:
        """Return the seconds to add the 16-bit gradients of a micro-batch to their sum."""
        return kernel_time.elementwise_time(self.accumulation_bytes * sum(part.trained for part in parts), hardware)

    def reductions(self, buckets: list[PlannedBucket], layout: Layout, zero_stage: int) -> list[RepeatedCollective]:
        """Return the reductions of gradients in a step of ZeRO 0 to 2."""
        return reductions(buckets, layout, zero_stage, self.gradient_bytes, self.reduce_bytes)

    def sharded_exchanges(self, buckets: list[PlannedBucket], layout: Layout) -> list[RepeatedCollective]:
        """Return the gatherings of weights and reductions of gradients in a step of ZeRO 3."""
        return gathers(buckets, layout, 3, self.weight_bytes) + self.reductions(buckets, layout, 3)

    def step_exchanges(
        self, buckets: list[PlannedBucket], layout: Layout, rank: int, zero_stage: int, hidden_bytes: float, states: int, *, reference: bool
    ) -> list[RepeatedCollective]:
        """Return all collectives of a step on a pipeline rank besides the model's own.

        Args:
            buckets: of the rank.
            rank: coordinate on the pipeline axis.
            hidden_bytes, states, reference: as in communication.sends.
        """
        return [
            *self.reductions(buckets, layout, zero_stage),
            *gathers(buckets, layout, zero_stage, self.weight_bytes, reference=reference),
            *(RepeatedCollective(sent, 1) for sent in exchanges(matrix_rounds(buckets, layout, zero_stage), self.weight_bytes)),
            *sends(layout, rank, hidden_bytes, states, reference=reference),
        ]

    def model_state(self, buckets: list[PlannedBucket], state_format: StateFormat) -> ModelState:
        """Return the bytes of weights, gradients and optimizer state."""
        return model_state(buckets, state_format, gradient_bytes=self.gradient_bytes)

    def saved_bytes(self, part: TracedPart) -> float:
        """Return the bytes that a part keeps for its backward pass."""
        return part.saved

    def transient_bytes(self, part: TracedPart) -> tuple[float, float]:
        """Return the most bytes that a part allocates besides what it saves, in its forward and in its backward pass."""
        return part.peaks


def _folded(layout: Layout, node: int) -> Group:
    """Return the group of all tensor and expert ranks; between those of two expert ranks are the other context ranks."""
    experts_per_node = max(1, node // (layout.tensor * layout.context))
    return Group(layout.expert_ranks, min(layout.expert_ranks, node, layout.tensor * experts_per_node))


def engine_model(state_format: StateFormat) -> EngineModel:
    """Return the model of this project's engine, for ranks that store their weights so."""
    return EngineModel(
        products=SHARDED_PRODUCTS if state_format.zero_stage == 3 else 1.0,
        weight_bytes=state_format.weight_bytes,
        reduce_bytes=state_format.reduce_bytes,
    )
