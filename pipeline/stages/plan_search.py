"""stage=plan with stage.search or stage.scaling: the fastest layouts, and the time of a step over the number of nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from hydra.core.hydra_config import HydraConfig

from pipeline.common.errors import UserError
from pipeline.common.files import atomic_file
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Plan as PlanConfig
from pipeline.launch import job
from pipeline.planner.plan import hardware_of
from pipeline.planner.search import CHOSEN, Choice, SearchResult, Traces, best_layout, search, why_slower
from pipeline.planner.search_plots import ScalingPoint, draw_scaling, draw_search

GB = 1e9
#: Layouts that are printed.
LINES = 10


def run(config: RunConfig, world_size: int) -> None:
    """Search and print.

    Raises:
        UserError: no layout is legal, or none fits.
    """
    stage = config.stage
    assert isinstance(stage, PlanConfig)
    if stage.scaling:
        scale(config, stage)
        return
    hardware = hardware_of(config)
    found = search(config, world_size, hardware)
    if not found.legal:
        rule = f"no layout of {world_size:,} ranks is legal with training.global_batch_size={config.training.global_batch_size}"
        raise UserError.of("cluster.nodes", config.cluster.nodes, rule, "choose a batch that is a multiple of the data ranks")
    if not found.choices:
        need = f"; the smallest layout needs {found.smallest.plan.estimate.memory.total / GB:.1f} GB" if found.smallest else ""
        rule = f"no layout fits in {hardware.memory_gb:.1f} GB{need}"
        raise UserError.of("cluster.nodes", config.cluster.nodes, rule, "use more nodes")
    print("\n".join(found_lines(found)))
    print("\nsubmit\n" + override_line(config, found.choices[0], world_size))
    if stage.plot:
        draw_search(found, Path(stage.plot))
        print(f"\ntime and memory\n{stage.plot}")
    if stage.out:
        _write_json(Path(stage.out), [content(choice) for choice in found.choices])


def scale(config: RunConfig, stage: PlanConfig) -> None:
    """Print the strong-scaling curve."""
    training, points = config.training, []
    tokens = stage.tokens or float(training.steps * training.global_batch_size * training.sequence_length)
    print(f"best layout for {tokens:.3g} tokens at a global batch of {training.global_batch_size:,} sequences")
    print(f"  {'nodes':>6}{'step':>11}{'days':>10}{'node-hours':>13}{'efficiency':>12}  layout")
    for point in scaling_points(config, tokens):
        print(scaling_line(point), flush=True)
        points.append(point)
    if stage.plot:
        draw_scaling(points, Path(stage.plot))
        print(f"\ntime over nodes\n{stage.plot}")
    if stage.out:
        _write_json(Path(stage.out), [scaling_content(point) for point in points])


def found_lines(found: SearchResult) -> Iterator[str]:
    """Yield the best layouts with the reason why each loses, and the Pareto front of time and memory."""
    best = found.choices[0]
    counts = f"{found.legal:,} legal layouts, {found.fitting:,} may fit, {len(found.choices):,} of the simulated ones fit"
    yield f"{counts}; searched in {found.seconds:.1f} s"
    yield f"  {'step':>10}{'memory':>12}  {'loses by':<34}layout"
    for choice in found.choices[:LINES]:
        reason = "best" if choice is best else why_slower(choice, best)
        yield f"  {choice.step_time:>8.3f} s{gigabytes(choice)}  {reason:<34}{' '.join(choice.settings)}"
    yield "no other layout is faster with less memory (Pareto front)"
    for choice in found.front[:LINES]:
        yield f"  {choice.step_time:>8.3f} s{gigabytes(choice)}  {' '.join(choice.settings)}"


def gigabytes(choice: Choice) -> str:
    """The memory of the fullest rank."""
    return f"{choice.plan.estimate.memory.total / GB:>9.1f} GB"


def scaling_points(config: RunConfig, tokens: float) -> Iterator[ScalingPoint]:
    """Yield the best layout of 1, 2, 4, ... nodes with the same global batch."""
    hardware, training, traces = hardware_of(config), config.training, Traces()
    steps = tokens / (training.global_batch_size * training.sequence_length)
    least: float | None = None
    nodes = 1
    while nodes <= config.cluster.nodes:
        best = best_layout(config, nodes, hardware, traces)
        if best is None:
            yield ScalingPoint(nodes, None)
        else:
            days = steps * best.step_time / 86400
            least = least or days * nodes
            yield ScalingPoint(nodes, best, days, least / (days * nodes))
        nodes = config.cluster.nodes if nodes < config.cluster.nodes < 2 * nodes else 2 * nodes


def scaling_line(point: ScalingPoint) -> str:
    """A line of the strong-scaling curve."""
    if point.choice is None:
        return f"  {point.nodes:>6}  no layout is legal with this batch and fits"
    times = f"{point.choice.step_time:>9.3f} s{point.days:>10.2f}{point.node_hours:>13,.0f}{point.efficiency:>12.1%}"
    return f"  {point.nodes:>6}{times}  {' '.join(point.choice.settings)}"


def override_line(config: RunConfig, choice: Choice, world_size: int) -> str:
    """Return the sbatch line of a layout."""
    given = HydraConfig.get().overrides.task
    words = [word for word in given if not word.startswith("stage") and word.lstrip("+").partition("=")[0] not in CHOSEN]
    return job.sbatch_line(config.cluster, "pretrain", world_size, [*words, *choice.settings])


def content(choice: Choice) -> dict[str, object]:
    """A layout as JSON."""
    estimate = choice.plan.estimate
    return {
        "settings": list(choice.settings),
        "step_time_s": estimate.step_time,
        "causes_s": estimate.causes,
        "memory_bytes": {**asdict(estimate.memory), "total": estimate.memory.total},
    }


def scaling_content(point: ScalingPoint) -> dict[str, object]:
    """A number of nodes as JSON."""
    costs = {"days": point.days, "node_hours": point.node_hours, "efficiency": point.efficiency}
    return {"nodes": point.nodes, **({} if point.choice is None else {**costs, **content(point.choice)})}


def _write_json(path: Path, value: object) -> None:
    with atomic_file(path, "w") as file:
        file.write(json.dumps(value, indent=1) + "\n")
