"""Strong scaling: the best layout of 1, 2, 4, ... nodes with the same global batch."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.schema import RunConfig
from pipeline.planner.plan import hardware_of
from pipeline.planner.run_cost import run_seconds
from pipeline.planner.search import Traces, best_layout
from pipeline.planner.search_plots import ScalingPoint


def scaling_points(config: RunConfig) -> Iterator[ScalingPoint]:
    """Yield the best layout of a job on 1, 2, 4, ... up to cluster.nodes nodes."""
    hardware, traces = hardware_of(config), Traces()
    least: float | None = None
    nodes = 1
    while nodes <= config.cluster.nodes:
        best = best_layout(config, nodes, hardware, traces)
        if best is None:
            yield ScalingPoint(nodes, None)
        else:
            days = run_seconds(best.plan) / 86400
            least = least or days * nodes
            yield ScalingPoint(nodes, best, days, least / (days * nodes))
        nodes = config.cluster.nodes if nodes < config.cluster.nodes < 2 * nodes else 2 * nodes
