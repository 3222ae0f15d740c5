"""Pictures of the planner: time over memory of the layouts that fit, time over the number of nodes, and what all pictures share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.common.atomic_files import atomic_file
from pipeline.common.errors import UserError
from pipeline.planner.run_cost import ScalingPoint
from pipeline.planner.search import Choice, SearchResult


def new_figure(path: Path, width: float, height: float) -> Any:
    """Return an empty figure of matplotlib, which is an optional package.

    Raises:
        UserError: it is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError.of("stage.plot", path, "requires matplotlib", "pip install matplotlib") from None
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG."""
    with atomic_file(path, "wb") as file:
        figure.savefig(file, format="png", dpi=120)


def plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis with 1, 2, 5, 10, ... instead of powers."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_formatter(NullFormatter())


GB = 1e9
COLORS = {1: "#2166ac", 2: "#1b7837", 3: "#b2182b"}
MARKERS = {"none": "^", "selective": "s", "full": "o"}


def draw_search(result: SearchResult, path: Path) -> None:
    """Write a PNG: time of a step over memory of the fullest rank for all simulated layouts that fit, with the Pareto front.

    Raises:
        UserError: matplotlib is not installed.
    """
    front = result.front
    lines = 0.25 * len(front)  # inches of the list below the picture
    figure = new_figure(path, 12, 6 + lines)
    axes, below = figure.subplots(2, 1, height_ratios=[6, lines])
    for zero, color in COLORS.items():
        for recompute, marker in MARKERS.items():
            shown = [choice for choice in result.choices if _kind(choice) == (zero, recompute)]
            if shown:
                label = f"ZeRO {zero}, recomputation {recompute}"
                axes.scatter(*_points(shown), color=color, marker=marker, alpha=0.6, linewidths=0, label=label)
    axes.plot(*_points(front), color="black", lw=1, label="Pareto front")
    for number, choice in enumerate(front, 1):
        point = choice.plan.estimate.memory.total / GB, choice.step_time
        axes.annotate(str(number), point, xytext=(6, 6), textcoords="offset points", fontsize=10, fontweight="bold")
    names = [f"{number:>2}  {' '.join(_short(word) for word in choice.settings)}" for number, choice in enumerate(front, 1)]
    below.text(0.0, 1.0, "\n".join(names), transform=below.transAxes, va="top", fontsize=9, family="monospace")
    below.set_axis_off()
    plan = result.choices[0].plan
    axes.set(xlabel="planned memory of the fullest rank, GB", ylabel="planned time of a step, s")
    axes.set_title(f"{plan.config.model.family}, {plan.config.model.layers} layers on {plan.layout.world_size:,} x {plan.hardware.name}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0))
    axes.grid(alpha=0.2)
    save(figure, path)


def draw_scaling(points: Sequence[ScalingPoint], path: Path) -> None:
    """Write a PNG: days and efficiency of a run over the number of nodes, with the best layout of each.

    Raises:
        UserError: matplotlib is not installed.
    """
    shown = [point for point in points if point.choice is not None]
    figure = new_figure(path, 12, 5)
    days, efficiency = figure.subplots(1, 2)
    nodes = [point.nodes for point in shown]
    days.plot(nodes, [point.days for point in shown], marker="o", color="#2166ac", label="planned")
    if shown:
        ideal = [shown[0].days * shown[0].nodes / count for count in nodes]
        days.plot(nodes, ideal, color="#999999", ls="--", label="without loss")
    days.set(xscale="log", yscale="log", xlabel="nodes", ylabel="days")
    efficiency.plot(nodes, [100 * point.efficiency for point in shown], marker="o", color="#2166ac")
    highest = max((point.efficiency for point in shown), default=1.0)
    efficiency.set(xscale="log", xlabel="nodes", ylabel="efficiency, % (node-hours of the fewest nodes = 100)", ylim=(0, 110 * highest))
    for point in shown:
        label = f"{point.days:,.1f}"
        days.annotate(label, (point.nodes, point.days), xytext=(8, 4), textcoords="offset points")
    for axis in (days.xaxis, days.yaxis, efficiency.xaxis):
        plain_numbers(axis)
    for axes in (days, efficiency):
        axes.set_xticks(nodes, [f"{count:,}" for count in nodes])
        axes.grid(which="both", alpha=0.2)
    days.legend()
    save(figure, path)


def _kind(choice: Choice) -> tuple[int, str]:
    """What the color and the marker of a layout stand for."""
    config = choice.plan.config
    return config.parallel.zero_stage, config.training.activation_checkpointing


def _points(choices: Sequence[Choice]) -> tuple[list[float], list[float]]:
    """Memory (GB) and time (s) of some layouts."""
    return [choice.plan.estimate.memory.total / GB for choice in choices], [choice.step_time for choice in choices]


def _short(setting: str) -> str:
    """A setting without its group."""
    return setting.partition(".")[2].replace("activation_checkpointing", "recompute").replace("micro_batch_size", "micro_batch")
