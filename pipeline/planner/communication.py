"""The collectives of a step besides the model's own, as training/ and parallel/ execute them, for every rank, and the time of each.

Gradients are reduced bucket by bucket (training/buckets.py), ZeRO gathers weights (training/weight_gathering.py), activations are sent
between pipeline stages, and matrices to the ranks that orthogonalize them (training/matrix_homes.py). tests/planner/test_real_run.py
compares the list with the collectives of real runs. The time is alpha-beta, with the topology of nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.config.hardware import Hardware
from pipeline.config.layout import Layout
from pipeline.planner.operations import Collective, Kind, Phase
from pipeline.planner.planned_buckets import PlannedBucket


@dataclass(frozen=True)
class RepeatedCollective:
    """A collective that is repeated `count` times in a step; on the pipeline axis, a tensor that the rank sends."""

    collective: Collective
    count: int


def reductions(
    buckets: list[PlannedBucket], layout: Layout, zero_stage: int, gradient_bytes: int, reduce_bytes: int
) -> list[RepeatedCollective]:
    """Return the reductions of gradients in a step.

    Args:
        zero_stage: 0 reduces whole gradients.
        gradient_bytes: of an accumulated gradient.
        reduce_bytes: of a gradient that is sent to be summed over the ranks that shard it.
    """
    kind: Kind = "all_reduce" if zero_stage == 0 else "reduce_scatter"
    collectives = []
    for bucket in buckets:
        if not bucket.trained:
            continue
        count, size = layout.micro_batches if zero_stage >= 2 and not bucket.shared else 1, float(gradient_bytes * bucket.elements)
        if bucket.summed:
            summed = Collective("all_reduce", "tensor", "backward", float(gradient_bytes * bucket.summed))
            collectives.append(RepeatedCollective(summed, count))
        if bucket.ranks > 1:
            sent = float(reduce_bytes * bucket.elements)
            collectives.append(RepeatedCollective(Collective(kind, bucket.shards_axis, "backward", sent), count))
        if bucket.replicas > 1:
            across = Collective("all_reduce", f"{bucket.axis}_replicas", "backward", size / bucket.ranks)
            collectives.append(RepeatedCollective(across, 1))
        if bucket.shared:
            collectives.append(RepeatedCollective(Collective("all_reduce", bucket.shared, "backward", size), 1))
    return collectives


def gathers(
    buckets: list[PlannedBucket], layout: Layout, zero_stage: int, weight_bytes: int, *, reference: bool = False
) -> list[RepeatedCollective]:
    """Return the gatherings of weights in a step: after it, or under ZeRO 3 before every use of matrices, also by a reference model."""
    collectives = []
    for bucket in buckets:
        if zero_stage > 0 and bucket.ranks > 1:
            count = 1
            if zero_stage == 3 and bucket.decays:
                of_reference = reference * (2 if bucket.head else 1)  # the head is applied once for each answer
                count = (bucket.gathers + of_reference) * layout.micro_batches - bucket.stays * (layout.micro_batches - 1)
            gathered = Collective("all_gather", bucket.shards_axis, "forward", float(weight_bytes * bucket.elements))
            collectives.append(RepeatedCollective(gathered, count))
    return collectives


def sends(layout: Layout, rank: int, hidden_bytes: float, states: int = 1, *, reference: bool = False) -> list[RepeatedCollective]:
    """Return the activations and gradients that a pipeline rank sends in a step.

    Args:
        rank: coordinate on the pipeline axis.
        hidden_bytes: of one hidden state of a micro-batch.
        states: number of hidden states between stages (encoder-decoders: 2).
        reference: whether the stages of a reference model send theirs, too.
    """
    neighbors: tuple[tuple[Phase, int], ...] = (("forward", 1), ("backward", -1))
    return [
        RepeatedCollective(
            Collective("send", "pipeline", phase, hidden_bytes),
            states * layout.micro_batches * (2 if reference and phase == "forward" else 1),
        )
        for stage in layout.stages(rank)
        for phase, distance in neighbors
        if 0 <= stage + distance < layout.stage_count and layout.holder(stage + distance) != rank
    ]


@dataclass(frozen=True)
class Group:
    """The ranks of a mesh axis, as the network sees them.

    Attributes:
        per_node: how many of them share a node.
        rails: network adapters of a node that they use together; 0 for one of each rank.
    """

    ranks: int
    per_node: int
    rails: int = 0

    @property
    def nodes(self) -> int:
        """Nodes of the group."""
        return math.ceil(self.ranks / self.per_node)


def group(ranks: int, stride: int, gpus_per_node: int) -> Group:
    """Return the group of an axis.

    Args:
        ranks: size of the axis.
        stride: product of the sizes of the axes inside it: the distance between neighboring ranks.
        gpus_per_node: ranks of a node, numbered consecutively.
    """
    return Group(ranks, max(1, min(ranks, gpus_per_node // stride)) if stride < gpus_per_node else 1)


def collective_time(kind: Kind, size: float, where: Group, hardware: Hardware) -> float:
    """Return the time of a collective in seconds.

    Within a node every GPU sends its part over its links. Between nodes, the GPUs of a group that share a node send in parallel, each
    over its share of the network; the group is as slow as the slower of both.

    Args:
        size: bytes of the full buffer: the result of an all-gather, the input of the others.
    """
    if where.ranks == 1:
        return 0.0
    rounds = 2 if kind == "all_reduce" else 1
    within = _link_rate(where.per_node, hardware)
    across = hardware.network_gb_s * 1e9 * hardware.network_share
    if kind == "send":
        if where.per_node > 1:
            return size / _link_rate(2, hardware) + hardware.link_us * 1e-6
        return size / across + hardware.network_us * 1e-6
    if kind == "all_to_all":
        inside = size * (where.per_node - 1) / where.ranks / within if where.per_node > 1 else 0.0
        outside = size * (where.ranks - where.per_node) / where.ranks / across
        return max(inside, outside) + _latency(where, hardware)
    inside = size * (where.per_node - 1) / where.per_node / within if where.per_node > 1 else 0.0
    rails = min(where.rails or where.per_node, where.per_node)
    outside = size * (where.nodes - 1) / where.nodes / (rails * across) if where.nodes > 1 else 0.0
    # Between nodes, a large collective is a ring with a step for every node.
    steps = max(0, where.nodes - 1) * hardware.ring_us * 1e-6
    return rounds * (max(inside, outside) + _latency(where, hardware) + steps)


def _link_rate(ranks: int, hardware: Hardware) -> float:
    """Bytes per second of a GPU to `ranks - 1` others of its node: all its links with a switch, else those to these GPUs."""
    peers = max(1, min(hardware.gpus_per_node, 8) - 1)
    share = 1.0 if hardware.switch else min(1.0, max(1, ranks - 1) / peers)
    return hardware.link_gb_s * 1e9 * hardware.link_share * share


def _latency(where: Group, hardware: Hardware) -> float:
    """Steps within the node and a tree between nodes."""
    across = hardware.network_us * math.ceil(math.log2(where.nodes)) if where.nodes > 1 else 0.0
    return ((hardware.link_us if where.per_node > 1 else 0.0) + across) * 1e-6
