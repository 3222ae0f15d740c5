"""The roofline of a step (Williams et al. 2009, https://doi.org/10.1145/1498765.1498785): what bounds each matrix product, as a picture."""

from __future__ import annotations

import math
from pathlib import Path

from pipeline.planner.plan import JobPlan, OperationRow
from pipeline.planner.plotting import new_figure, plain_numbers, save

COLORS = {"forward": "#2166ac", "backward": "#b2182b", "recompute": "#999999"}
#: Operations with a larger share of the time get their name.
LABELED_SHARE = 0.02
#: Area of a point, points squared, for an operation that takes all the time; and of the smallest.
FULL_AREA, LEAST_AREA = 4000.0, 12.0


def draw(plan: JobPlan, rows: list[OperationRow], path: Path) -> None:
    """Write a PNG: FLOP/s of every operation over its arithmetic intensity; the area of a point is its share of the time.

    Args:
        plan: the plan, for the title.
        rows: its table.
        path: of the picture.

    Raises:
        UserError: matplotlib is not installed.
    """
    total = sum(row.time * row.count for row in rows)
    shown = [row for row in rows if row.flops and row.bytes]
    figure = new_figure(path, 12, 6)
    axes = figure.add_subplot()
    _roof(axes, plan, [row.flops / row.bytes for row in shown])
    for phase, color in COLORS.items():
        points = [row for row in shown if row.phase == phase]
        areas = [LEAST_AREA + FULL_AREA * row.time * row.count / total for row in points]
        x, y = [row.flops / row.bytes for row in points], [row.flops / row.time / 1e12 for row in points]
        axes.scatter(x, y, s=areas, color=color, alpha=0.6, linewidths=0)
        axes.scatter([], [], s=60, color=color, alpha=0.6, linewidths=0, label=phase)  # points of the legend have one size
    # Numbers beside the points, and names in a list: operations of about the same intensity and speed would hide each other's names.
    labeled = [row for row in shown if row.time * row.count > LABELED_SHARE * total]
    groups: dict[tuple[float, float], list[OperationRow]] = {}
    for row in labeled:
        place = round(math.log10(row.flops / row.bytes), 1), round(math.log10(row.flops / row.time), 1)
        groups.setdefault(place, []).append(row)
    names = []
    for number, members in enumerate(groups.values(), 1):
        first = members[0]
        point = first.flops / first.bytes, first.flops / first.time / 1e12
        axes.annotate(str(number), point, xytext=(12, 8), textcoords="offset points", fontsize=10, fontweight="bold")
        names += [f"{number:>2}  {row.time * row.count / total:4.0%}  {row.name.removesuffix('.weight')}, {row.phase}" for row in members]
    axes.text(1.02, 1.0, "\n".join(names), transform=axes.transAxes, va="top", fontsize=9, family="monospace")
    axes.set(xscale="log", yscale="log", xlabel="arithmetic intensity, FLOP per byte of memory", ylabel="TFLOP/s")
    layout = plan.layout
    sizes = f"tensor {layout.tensor}, pipeline {layout.pipeline}, data {layout.data}"
    axes.set_title(
        f"{plan.config.model.family}, {plan.config.model.layers} layers on {layout.world_size:,} x {plan.hardware.name} ({sizes})"
    )
    for axis in (axes.xaxis, axes.yaxis):
        plain_numbers(axis)
    axes.legend(loc="lower right")
    axes.grid(which="both", alpha=0.2)
    save(figure, path)


def _roof(axes, plan: JobPlan, intensities: list[float]) -> None:  # type: ignore[no-untyped-def] # matplotlib has few types
    """Draw the bounds of memory and of matrix products in the trained precision, as data sheets state them."""
    peak, bandwidth = plan.hardware.peak(plan.config.precision).tflops, plan.hardware.memory_tb_s
    ridge = peak / bandwidth
    left, right = min([ridge, *intensities]) / 4, max([ridge, *intensities]) * 2
    axes.plot([left, ridge, right], [left * bandwidth, peak, peak], color="black", lw=1)
    axes.annotate(f"{bandwidth:g} TB/s", (left, left * bandwidth), fontsize=9, va="top", ha="left")
    axes.annotate(f"{peak:,.0f} TFLOP/s", (right, peak), fontsize=9, va="bottom", ha="right")
