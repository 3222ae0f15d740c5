"""The fullest rank of a layout with its model state from the traced weights, and what other frameworks hold in the same layout."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.layout import Coordinates, Layout
from pipeline.config.schema import RunConfig
from pipeline.parallel.parallelize import DTYPES
from pipeline.planner.communication import step_exchanges
from pipeline.planner.operations import AttentionCall, Collective
from pipeline.planner.plan import hidden_bytes, hidden_states
from pipeline.planner.planned_buckets import planned_buckets, rank_weights
from pipeline.planner.state_memory import FP32, ModelState, model_state, state_format_of
from pipeline.planner.trace import Trace


@dataclass(frozen=True)
class RankParameters:
    """Number of parameters of a rank before ZeRO.

    Attributes:
        dense: of weights that all expert ranks hold.
        experts: of weights that are sharded over the expert axis.
    """

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def fullest_rank(traced: Trace, layout: Layout) -> tuple[int, RankParameters]:
    """Return the rank that holds the most parameters, and their numbers. Ranks that differ in other axes hold no more."""
    parameters = {}
    for pipeline in range(layout.pipeline):
        rank = layout.rank(Coordinates(pipeline=pipeline, data=0, expert=0, context=0, tensor=0))
        weights = [weights for _, weights in rank_weights(traced, layout, layout.stages(pipeline))]
        elements = {axis: sum(w.elements for w in weights if w.axis == axis) for axis in ("dense", "data")}
        parameters[rank] = RankParameters(elements["dense"], elements["data"])
    rank = max(parameters, key=lambda rank: parameters[rank].total)
    return rank, parameters[rank]


def planned_state(config: RunConfig, traced: Trace, layout: Layout, rank: int) -> ModelState:
    """Return the bytes of a rank's state from the traced weights."""
    buckets = planned_buckets(traced, layout, layout.stages(layout.coordinates(rank).pipeline))
    return model_state(buckets, state_format_of(config, layout))


def megatron_bytes(config: RunConfig, layout: Layout, parameters: RankParameters) -> float:
    """Return the model state of Megatron-LM's distributed optimizer in the same layout.

    Weights, fp32 gradients, and 12 bytes of fp32 master weight and two moments over the ranks that hold the same weight: those of data and
    context, for dense weights also of the expert axis (Megatron-LM, docs/source/api-guide/dist_optimizer.md).
    """
    whole, data = DTYPES[config.precision.dtype].itemsize + FP32, layout.data * layout.context
    return parameters.total * whole + 3 * FP32 * (parameters.dense / (data * layout.expert) + parameters.experts / data)


def fsdp2_bytes(layout: Layout, parameters: RankParameters) -> float:
    """Return the model state of PyTorch's FSDP2 in the same layout, with the mesh axes that shard the same weights flattened to one.

    fp32 weights, gradients and two moments, all sharded; without the gathered weights of the blocks in use.
    """
    data = layout.data * layout.context
    return 4 * FP32 * (parameters.dense / (data * layout.expert) + parameters.experts / data)


#: Columns of a table, in the order of its axes.
AXES = ("tensor", "context", "expert", "data", "pipeline")


def sent_bytes(config: RunConfig, trace: Trace, layout: Layout, rank: int) -> dict[str, float]:
    """Return the bytes that a rank sends in a step along each axis of `AXES`.

    Of a collective over n ranks, a rank sends (n - 1) / n of the whole buffer, of an all-reduce twice as much. Gradients and weights are
    counted as data, also where context and expert ranks hold the same ones; those of a tied embedding as pipeline.
    """
    coordinates = layout.coordinates(rank)
    stages, states = layout.stages(coordinates.pipeline), hidden_states(config)
    exchanges = step_exchanges(trace, layout, coordinates.pipeline, state_format_of(config), hidden_bytes(config), states)
    sent = dict.fromkeys(AXES, 0.0)
    for exchange in exchanges:
        _add(sent, exchange.collective, layout, exchange.count)
    for operation in (operation for stage in stages for part in trace.stage_parts(layout, stage) for operation in part.operations):
        if isinstance(operation, Collective):
            _add(sent, operation, layout, layout.micro_batches)
        elif isinstance(operation, AttentionCall) and operation.sent:  # keys and values along the ring
            sent["context"] += layout.micro_batches * operation.sent
    return sent


def _add(sent: dict[str, float], collective: Collective, layout: Layout, count: int) -> None:
    """Add the bytes that a rank sends in `count` repetitions of a collective."""
    replicas = layout.context * layout.data
    sizes = {"dense": replicas * layout.expert, "data": replicas, "tied_embedding": 2, "expert": layout.expert_ranks}
    for axis, experts in (("dense", False), ("data", True)):
        sizes[f"{axis}_shards"], sizes[f"{axis}_replicas"] = layout.zero_sizes(experts=experts)
    ranks = sizes[collective.axis] if collective.axis in sizes else getattr(layout, collective.axis)
    axis = {"dense": "data", "tied_embedding": "pipeline"}.get(collective.axis.partition("_")[0], collective.axis)
    share = 1.0 if collective.kind == "send" else (2 if collective.kind == "all_reduce" else 1) * (ranks - 1) / ranks
    sent[axis] += share * collective.bytes * count
