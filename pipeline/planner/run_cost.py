"""Time and cost of a whole run: the predicted steps of all its batch sizes and sequence lengths, on its nodes and on 1, 2, 4, ... nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.config import phases, warmup
from pipeline.config.schema import RunConfig
from pipeline.planner.plan import JobPlan, hardware_of, plan
from pipeline.planner.search import Choice, Traces, best_layout
from pipeline.planner.site_correction import COVERED, time_range


def run_seconds(result: JobPlan) -> float:
    """Return the seconds of all steps. Phases, and steps of ramp-ups of batch or sequence length, are predicted by themselves."""
    training = result.config.training
    seconds = 0.0
    if training.phases:
        jobs = phases.alone(result.config, result.layout.world_size)
        return sum(run_seconds(plan(job, size, result.hardware)) for job, size in jobs)
    for steps, batch, length in warmup.phases(training):
        parts = training.sequence_length // length
        if (batch, parts) == (training.global_batch_size, 1):
            seconds += steps * result.estimate.step_time
            continue
        micro = training.micro_batch_size * parts
        changed = replace(training, sequence_length=length, micro_batch_size=micro, global_batch_size=batch * parts)
        config = replace(result.config, training=changed)
        traced = result.trace if parts == 1 else None
        seconds += steps * plan(config, result.layout.world_size, result.hardware, traced).estimate.step_time
    return seconds


def cost(result: JobPlan) -> dict[str, float]:
    """Return tokens, steps, days, node-hours, GPU-hours and energy (MWh) of the run of training.steps."""
    training, layout, hardware = result.config.training, result.layout, result.hardware
    hours = run_seconds(result) / 3600
    return {
        "tokens": float(warmup.samples(training, training.steps) * training.sample_length),
        "steps": float(training.steps),
        "days": hours / 24,
        "node_hours": hours * layout.world_size / hardware.gpus_per_node,
        "gpu_hours": hours * layout.world_size,
        "mwh": hours * layout.world_size * (hardware.watts + hardware.node_watts) / 1e6,
    }


def cost_lines(costs: dict[str, float], config: RunConfig) -> Iterator[str]:
    """Yield the cost of the run, as `cost` returns it, with the range of its time."""
    yield f"the run: {costs['tokens']:.3g} tokens = {costs['steps']:,.0f} steps, without checkpoints, failures and validation"
    yield f"  {duration(costs['days'] * 86400)}, {number(costs['node_hours'])} node-hours, {number(costs['gpu_hours'])} GPU-hours"
    low, high = (duration(days * 86400) for days in time_range(costs["days"], config))
    yield f"  {low} to {high}, and as much less or more of the others, contain {COVERED:.0%} of unseen runs"
    yield f"  {number(costs['mwh'])} MWh at the stated power of GPUs and nodes"


def duration(seconds: float) -> str:
    """Return a duration in the largest unit of which it has at least one."""
    units = (("days", 86400), ("hours", 3600), ("minutes", 60))
    return next((f"{seconds / size:,.2f} {unit}" for unit, size in units if seconds >= size), f"{seconds:.2f} seconds")


def number(value: float) -> str:
    """Return a number with at least three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@dataclass(frozen=True)
class ScalingPoint:
    """The best layout of a number of nodes.

    Attributes:
        choice: layout and prediction; None if no layout fits.
        days: time of the run.
        efficiency: of the node-hours, relative to the smallest number of nodes that has a layout.
    """

    nodes: int
    choice: Choice | None
    days: float = 0.0
    efficiency: float = 0.0

    @property
    def node_hours(self) -> float:
        """The node-hours of the whole run."""
        return 24 * self.days * self.nodes


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
