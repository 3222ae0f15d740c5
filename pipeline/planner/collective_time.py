"""Time of collectives: alpha-beta with the topology of nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.config.hardware import Hardware
from pipeline.planner.operations import Kind


@dataclass(frozen=True)
class Group:
    """The ranks of a mesh axis, as the network sees them.

    Attributes:
        ranks: size of the group.
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
        kind: operation.
        size: bytes of the full buffer: the result of an all-gather, the input of the others.
        where: the ranks.
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
    return (hardware.link_us * (where.per_node > 1) + across) * 1e-6
