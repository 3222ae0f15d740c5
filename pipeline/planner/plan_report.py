"""What stage=plan prints of a plan: operations, memory, time and cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from pipeline.common.errors import UserError
from pipeline.config.schema import RunConfig
from pipeline.layers.delta_kernels import PACKAGE
from pipeline.parallel.parallelize import fuses_delta_rule
from pipeline.planner.engine_model import engine_model
from pipeline.planner.peak_memory import fullest_moment, largest_activations
from pipeline.planner.plan import JobPlan, OperationRow, hardware_of
from pipeline.planner.planned_buckets import planned_buckets
from pipeline.planner.plotting import new_figure, plain_numbers, save
from pipeline.planner.run_cost import ScalingPoint, cost, cost_lines, duration, run_seconds
from pipeline.planner.search import Choice, SearchResult, search, why_slower
from pipeline.planner.site_correction import COVERED, factors_text, memory_range, time_range
from pipeline.planner.state_memory import state_format_of

GB = 1e9
#: Lines of the table of operations, and of the largest activations.
LINES, TENANTS = 28, 4


def lines(result: JobPlan, rows: list[OperationRow], costs: dict[str, float], *, starts: bool) -> Iterator[str]:
    """Yield everything that is printed.

    Args:
        rows: its operations, as plan.table returns them.
        costs: as run_cost.cost returns it.
        starts: whether the job may start; one that does not fit takes no time and costs nothing.
    """
    yield from head_lines(result)
    yield from table_lines(rows)
    yield from memory_lines(result)
    if starts:
        yield from time_lines(result)
        yield from cost_lines(costs, result.config)


def head_lines(result: JobPlan) -> Iterator[str]:
    """Yield model, layout and hardware."""
    layout, training = result.layout, result.config.training
    yield f"{result.config.model.family}, {result.config.model.layers} layers, on {layout.world_size:,} x {result.hardware.name}"
    axes = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in ("tensor", "context", "expert", "data", "pipeline"))
    yield f"  {'layout':<14}{axes}, {layout.zero_text(result.config.parallel.zero_stage)}, {layout.schedule}"
    if result.config.precision.fp8 != "none":
        yield f"  {'precision':<14}fp8: linear layers are planned with their time in bf16, which 8 bits should undercut"
    if result.config.parallel.engine == "deepspeed":
        yield f"  {'engine':<14}deepspeed: planned with the memory and the time of the native one"
    if fuses_delta_rule(result.config, torch.device("meta")):
        yield f"  {'delta rule':<14}with the kernels of {PACKAGE}, where pip has installed them; training.delta_rule=plain plans without"
    if tuned := "; ".join(_tuning(result.config)):
        yield f"  {'trains':<14}{tuned}"
    batch = f"{layout.micro_batches:,} micro-batches of {training.micro_batch_size} x {training.sequence_length:,} tokens"
    yield f"  {'a rank':<14}{batch}, activation checkpointing {training.activation_checkpointing}"


def _tuning(config: RunConfig) -> Iterator[str]:
    """Yield what is trained, if it is not all weights to predict the next token."""
    if config.training.objective != "auto":
        yield config.training.objective
    if config.lora.rank:
        kept = config.precision.dtype if config.lora.quantize == "none" else f"{config.lora.quantize} in the blocks"
        yield f"adapters of rank {config.lora.rank}, the weights are frozen ({kept})"
    if config.training.frozen:
        yield f"without {', '.join(config.training.frozen)}"


def table_lines(rows: list[OperationRow]) -> Iterator[str]:
    """Yield the table of matrix products and all else that takes time."""
    total = sum(row.time * row.count for row in rows)
    yield "operations of a step on the ranks of one pipeline; shapes per rank"
    titles = f"{'operation':<34}{'phase':<10}{'shape (m x n x k)':<30}{'count':>9}{'GFLOP':>9}{'MB':>8}{'FLOP/B':>8}"
    yield f"  {titles}{'bound':>9}{'us':>9}{'share':>8}"
    shown = [row for index, row in enumerate(rows) if index < LINES or row.bound == "network"]
    for row in shown:
        intensity = f"{row.flops / row.bytes:.0f}" if row.flops and row.bytes else "-"
        gflop = f"{row.flops / 1e9:.1f}" if row.flops else "-"
        sizes = f"{row.count:>9,}{gflop:>9}{row.bytes / 1e6:>8.1f}{intensity:>8}"
        share = row.time * row.count / total
        yield f"  {row.name[-33:]:<34}{row.phase:<10}{row.shape:<30}{sizes}{row.bound:>9}{row.time * 1e6:>9.0f}{share:>8.1%}"
    if len(rows) > len(shown):
        rest = 1 - sum(row.time * row.count for row in shown) / total
        yield f"  {f'{len(rows) - len(shown)} more':<34}{rest:>91.1%}"
    products = sum(row.time * row.count for row in rows if row.shape) / total
    yield f"  matrix products and attention take {products:.1%} of the time of all operations"


def memory_lines(result: JobPlan) -> Iterator[str]:
    """Yield the memory of the fullest rank, when that is, and the largest activations."""
    memory, limit, rank = result.estimate.memory, result.hardware.memory_gb, result.estimate.pipeline_rank
    stages = {stage: result.trace.stage_parts(result.layout, stage) for stage in result.layout.stages(rank)}
    state_format = state_format_of(result.config)
    buckets = planned_buckets(result.trace, result.layout, result.layout.stages(rank), state_format.zero_stage)
    engine = engine_model(state_format)
    moment = fullest_moment(buckets, stages, state_format, engine, compiled=result.trace.compiled)
    kind = f"the {moment.part}" if moment.part in ("embed", "head") else "a block"
    direction = "backward" if moment.backward else "forward"
    when = "update of the weights" if memory.update > memory.passes else f"{direction} pass of {kind}"
    yield f"memory of the fullest rank (pipeline rank {rank}), most in the {when}"
    for name, value in asdict(memory).items():
        if name in ("host", "update") or (name == "frozen" and not value):
            continue
        yield f"  {name:<14}{value / GB:9.2f} GB"
        if name == "activations":
            for producer, size in largest_activations(list(stages.values()), value)[:TENANTS]:
                yield f"{size / GB:>20.2f} GB  {producer}"
    verdict = "fits" if result.estimate.fits else "DOES NOT FIT"
    yield f"  {'total':<14}{memory.total / GB:9.2f} GB of {limit:.1f} GB: {verdict}"
    if memory.update:
        yield f"  {'update':<14}{memory.update / GB:9.2f} GB in the update of Muon, instead of gradients, activations and transient tensors"
    low, high = memory_range(memory.total / GB)
    yield f"  {'range':<14}{low:9.2f} to {high:.2f} GB contains {COVERED:.0%} of unseen runs"
    if memory.host:
        yield f"  {'host memory':<14}{memory.host / GB:9.2f} GB (copies and the updates of the CPU are not in the time of a step)"
    if rate := result.estimate.host_rate:
        yield f"  {'copies':<14}{rate / GB:9.2f} GB/s to and from host memory, beside the passes; a slower link delays them"


def time_lines(result: JobPlan) -> Iterator[str]:
    """Yield the time of a step by cause."""
    estimate = result.estimate
    yield "time of a step"
    for cause, seconds in sorted(estimate.causes.items(), key=lambda item: -item[1]):
        if seconds > 0:
            yield f"  {cause:<22}{seconds:10.4f} s {seconds / estimate.step_time:7.1%}"
    yield from step_lines(result)


def step_lines(result: JobPlan) -> Iterator[str]:
    """Yield the time of a step with its range, tokens, FLOP/s and the share of the peak."""
    estimate, training = result.estimate, result.config.training
    tokens = training.global_batch_size * training.sequence_length
    rate = estimate.flops / estimate.step_time / result.layout.world_size / 1e12
    speed = f"{tokens / estimate.step_time / result.layout.world_size:,.0f} tokens/s and {rate:.0f} TFLOP/s a GPU"
    peak = result.hardware.peak(result.config.precision)
    yield f"  {'step':<22}{estimate.step_time:10.4f} s, {speed} ({rate / peak.tflops:.1%} of the {peak.number_format} peak)"
    low, high = time_range(estimate.step_time, result.config)
    site = "" if result.config.cluster.correction is None else f", corrected by {result.config.cluster.correction}"
    yield f"  {'range':<22}{low:10.4f} to {high:.4f} s contains {COVERED:.0%} of unseen runs{site}"


def content(result: JobPlan, rows: list[OperationRow], costs: dict[str, float]) -> dict[str, object]:
    """Return everything that is printed as JSON."""
    return {
        **estimate_content(result),
        "fits": result.estimate.fits,
        "cost": costs,
        "layout": asdict(result.layout),
        "hardware": result.hardware.name,
        "operations": [asdict(row) for row in rows],
    }


def estimate_content(result: JobPlan) -> dict[str, object]:
    """Return time and memory of a step with their ranges as JSON."""
    estimate = result.estimate
    return {
        "step_time_s": estimate.step_time,
        "step_time_range_s": time_range(estimate.step_time, result.config),
        "causes_s": estimate.causes,
        "memory_bytes": {**asdict(estimate.memory), "total": estimate.memory.total},
        "memory_range_bytes": memory_range(estimate.memory.total),
    }


COLORS = {"forward": "#2166ac", "backward": "#b2182b", "recompute": "#999999"}
#: Operations with a larger share of the time get their name.
LABELED_SHARE = 0.02
#: Area of a point, points squared, for an operation that takes all the time; and of the smallest.
FULL_AREA, LEAST_AREA = 4000.0, 12.0


def draw(plan: JobPlan, rows: list[OperationRow], path: Path) -> None:
    """Write a PNG: FLOP/s of every operation over its arithmetic intensity; the area of a point is its share of the time.

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


#: Layouts that are printed.
SEARCH_LINES = 10
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
    for choice in result.choices[:SEARCH_LINES]:
        reason = "best" if choice is best else why_slower(choice, best)
        yield f"  {_figures(choice)}  {reason:<34}{' '.join(choice.settings)}"
    yield "no other layout is faster with less memory (Pareto front)"
    for choice in result.front[:SEARCH_LINES]:
        yield f"  {_figures(choice)}  {' '.join(choice.settings)}"
    yield "the best layout"
    yield from step_lines(best.plan)
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
    return {"settings": list(choice.settings), **estimate_content(choice.plan), "cost": cost(choice.plan)}


def scaling_content(point: ScalingPoint) -> dict[str, object]:
    """Return a number of nodes as JSON."""
    costs = {"days": point.days, "node_hours": point.node_hours, "efficiency": point.efficiency}
    return {"nodes": point.nodes, **({} if point.choice is None else {**costs, **choice_content(point.choice)})}
