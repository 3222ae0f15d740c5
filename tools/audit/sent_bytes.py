"""Bytes that a rank sends in a step, by mesh axis."""

from __future__ import annotations

from pipeline.config.layout import Layout
from pipeline.config.schema import RunConfig
from pipeline.planner.communication import step_exchanges
from pipeline.planner.operations import AttentionCall, Collective
from pipeline.planner.plan import hidden_bytes, hidden_states
from pipeline.planner.state_memory import state_format_of
from pipeline.planner.trace import Trace

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
