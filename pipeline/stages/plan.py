"""plan: matrix products, memory, time and cost of a planned pretrain job, from its model on the meta device. Requires no GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.common.atomic_files import atomic_file
from pipeline.common.ranks import Ranks
from pipeline.config import compose
from pipeline.config.layout import job_size
from pipeline.config.paths import batch_scripts
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Plan as PlanConfig
from pipeline.launch import job
from pipeline.planner import measured_report, plan_report, roofline_plot, search_report
from pipeline.planner.plan import hardware_of, plan, table
from pipeline.planner.scaling import scaling_points
from pipeline.planner.search import CHOSEN
from pipeline.planner.search_plots import draw_scaling, draw_search


def run(config: RunConfig, ranks: Ranks) -> None:
    """Print the plan of the configured job, of the run of stage.run, or of other layouts.

    Raises:
        UserError: cluster.hardware does not name a file of conf/hardware/, stage.run cannot be read, or no layout fits.
    """
    stage = config.stage
    assert isinstance(stage, PlanConfig)
    if ranks.rank > 0:
        return  # additional ranks do nothing
    if stage.run:
        _compare(config, Path(stage.run), stage.out)
    elif stage.scaling:
        _scale(config, stage)
    elif stage.search:
        _search(config, stage, job_size(config, 1))
    else:
        _plan(config, stage, job_size(config, 1))


def _plan(config: RunConfig, stage: PlanConfig, world_size: int) -> None:
    """Print the plan of the configured job."""
    started = time.perf_counter()
    result = plan(config, world_size, hardware_of(config))
    rows, costs = table(result), plan_report.cost(result, stage.tokens)
    print("\n".join(plan_report.lines(result, rows, costs)))
    print("\nsubmit\n" + _sbatch_line(config, world_size))
    if stage.plot:
        roofline_plot.draw(result, rows, Path(stage.plot))
        print(f"\nroofline\n{stage.plot}")
    if stage.out:
        _write_json(stage.out, plan_report.content(result, rows, costs))
    print(f"\nplanned in {time.perf_counter() - started:.1f} s")


def _compare(config: RunConfig, run_dir: Path, out: str | None) -> None:
    """Print the plan of a job that has run beside its measured step time and memory; cluster.hardware replaces that of the run."""
    run, planned = measured_report.compare(config, run_dir)
    print("\n".join(measured_report.lines(run_dir, run, planned)))
    if out:
        _write_json(out, measured_report.content(run, planned))


def _search(config: RunConfig, stage: PlanConfig, world_size: int) -> None:
    """Print the fastest layouts."""
    result = search_report.search_layouts(config, world_size)
    best = result.choices[0]
    print("\n".join(search_report.search_lines(result)))
    print("\nsubmit\n" + _sbatch_line(config, world_size, best.settings))
    if stage.plot:
        draw_search(result, Path(stage.plot))
        print(f"\ntime and memory\n{stage.plot}")
    if stage.out:
        _write_json(stage.out, [search_report.choice_content(choice) for choice in result.choices])


def _scale(config: RunConfig, stage: PlanConfig) -> None:
    """Print the strong-scaling curve, each line when it is computed."""
    training, points = config.training, []
    tokens = stage.tokens or float(training.steps * training.global_batch_size * training.sequence_length)
    print(f"best layout for {tokens:.3g} tokens at a global batch of {training.global_batch_size:,} sequences")
    print(search_report.SCALING_TITLES)
    for point in scaling_points(config, tokens):
        print(search_report.scaling_line(point), flush=True)
        points.append(point)
    if stage.plot:
        draw_scaling(points, Path(stage.plot))
        print(f"\ntime over nodes\n{stage.plot}")
    if stage.out:
        _write_json(stage.out, [search_report.scaling_content(point) for point in points])


def _sbatch_line(config: RunConfig, world_size: int, layout: Sequence[str] = ()) -> str:
    """Return the sbatch line of the job.

    Args:
        config: of the job.
        world_size: ranks.
        layout: overrides of a searched layout, which replace those of the command line.
    """
    words = [word for word in compose.task_arguments() if not word.startswith("stage")]
    if layout:
        words = [word for word in words if word.lstrip("+").partition("=")[0] not in CHOSEN]
    return job.sbatch_line(config.cluster, "pretrain", world_size, [*words, *layout], batch_scripts(Path.cwd()))


def _write_json(path: str, content: object) -> None:
    """Write what is printed as JSON."""
    with atomic_file(Path(path), "w") as file:
        file.write(json.dumps(content, indent=1) + "\n")
