"""What stage=plan prints and writes of a search for layouts (stage.search) and of strong scaling (stage.scaling)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from pipeline.common.errors import UserError
from pipeline.config.schema import RunConfig
from pipeline.planner.accuracy import factors_text, memory_range, time_range
from pipeline.planner.plan import hardware_of
from pipeline.planner.run_cost import cost, cost_lines, duration, run_seconds
from pipeline.planner.search import Choice, SearchResult, search, why_slower
from pipeline.planner.search_plots import ScalingPoint

GB = 1e9
#: Layouts that are printed.
LINES = 10
#: Titles of the strong-scaling curve.
SCALING_TITLES = f"  {'nodes':>6}{'step':>11}{'days':>10}{'node-hours':>13}{'efficiency':>12}  layout"


def search_layouts(config: RunConfig, world_size: int) -> SearchResult:
    """Search for the fastest layouts of a job.

    Raises:
        UserError: cluster.hardware names no GPU, no layout is legal, or none fits.
    """
    hardware = hardware_of(config)
    result = search(config, world_size, hardware)
    if not result.legal:
        rule = f"no layout of {world_size:,} ranks is legal with training.global_batch_size={config.training.global_batch_size}"
        raise UserError.of("cluster.nodes", config.cluster.nodes, rule, "choose a batch that is a multiple of the data ranks")
    if not result.choices:
        need = f"; the smallest layout needs {result.smallest.plan.estimate.memory.total / GB:.1f} GB" if result.smallest else ""
        rule = f"no layout fits in {hardware.memory_gb:.1f} GB{need}"
        raise UserError.of("cluster.nodes", config.cluster.nodes, rule, "use more nodes")
    return result


def search_lines(result: SearchResult) -> Iterator[str]:
    """Yield the best layouts with the reason why each loses, and the Pareto front of time and memory."""
    best = result.choices[0]
    counts = f"{result.legal:,} legal layouts, {result.fitting:,} may fit, {len(result.choices):,} of the simulated ones fit"
    yield f"{counts}; searched in {result.seconds:.1f} s"
    yield factors_text(best.plan.config)
    yield f"  {'step':>10}{'run':>15}{'memory':>12}  {'loses by':<34}layout"
    for choice in result.choices[:LINES]:
        reason = "best" if choice is best else why_slower(choice, best)
        yield f"  {_figures(choice)}  {reason:<34}{' '.join(choice.settings)}"
    yield "no other layout is faster with less memory (Pareto front)"
    for choice in result.front[:LINES]:
        yield f"  {_figures(choice)}  {' '.join(choice.settings)}"
    yield "the best layout"
    yield from cost_lines(cost(best.plan), best.plan.config)


def _figures(choice: Choice) -> str:
    """Return the time of a step and of the run, and the memory of the fullest rank."""
    run = duration(run_seconds(choice.plan))
    return f"{choice.step_time:>8.3f} s{run:>15}{choice.plan.estimate.memory.total / GB:>9.1f} GB"


def scaling_line(point: ScalingPoint) -> str:
    """Return a line of the strong-scaling curve."""
    if point.choice is None:
        return f"  {point.nodes:>6}  no layout is legal with this batch and fits"
    times = f"{point.choice.step_time:>9.3f} s{point.days:>10.2f}{point.node_hours:>13,.0f}{point.efficiency:>12.1%}"
    return f"  {point.nodes:>6}{times}  {' '.join(point.choice.settings)}"


def choice_content(choice: Choice) -> dict[str, object]:
    """Return a layout as JSON."""
    estimate = choice.plan.estimate
    return {
        "settings": list(choice.settings),
        "step_time_s": estimate.step_time,
        "step_time_range_s": time_range(estimate.step_time, choice.plan.config),
        "memory_range_bytes": memory_range(estimate.memory.total),
        "cost": cost(choice.plan),
        "causes_s": estimate.causes,
        "memory_bytes": {**asdict(estimate.memory), "total": estimate.memory.total},
    }


def scaling_content(point: ScalingPoint) -> dict[str, object]:
    """Return a number of nodes as JSON."""
    costs = {"days": point.days, "node_hours": point.node_hours, "efficiency": point.efficiency}
    return {"nodes": point.nodes, **({} if point.choice is None else {**costs, **choice_content(point.choice)})}
