"""plan: matrix products, memory, time and cost of a planned training job, from its model on the meta device. Requires no GPU."""

from __future__ import annotations

import re
import time
from pathlib import Path

from pipeline.common.atomic_files import make_folder, write_json
from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks
from pipeline.config import compose, phases, warmup
from pipeline.config.layout import job_size
from pipeline.config.planned import planned_job
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Plan as PlanConfig
from pipeline.config.stages import plans_other_layouts
from pipeline.launch import live
from pipeline.planner import measured_report, memory_check, plan_report, site_correction
from pipeline.planner.plan import hardware_of, plan, table
from pipeline.planner.plotting import draw_scaling, draw_search
from pipeline.planner.run_cost import cost, scaling_points
from pipeline.planner.search import CHOSEN
from pipeline.training import finetuning


def run(config: RunConfig, ranks: Ranks) -> None:
    """Print the plan of the configured job, of the run of stage.run, or of other layouts.

    Raises:
        UserError: cluster.hardware does not name a file of conf/hardware/, stage.run cannot be read, an output cannot be written, or the
            job does not fit in memory.
    """
    stage = config.stage
    assert isinstance(stage, PlanConfig)
    if ranks.rank > 0:
        return  # additional ranks do nothing
    for key in ("out", "plot"):
        if (path := getattr(stage, key)) is not None:
            make_folder(Path(path).parent, f"stage.{key}")  # before what may take minutes
    if stage.run:
        _compare(config, Path(stage.run), stage.out)
        return
    world_size, planned = job_size(config, 1), planned_job(config)
    _check_steps(stage, planned)
    if planned.stage.name == "finetune":
        planned = finetuning.planned(planned, world_size, layout=not plans_other_layouts(stage))
    if stage.scaling:
        _scale(planned, stage)
    elif stage.search:
        _search(planned, stage, world_size)
    else:
        started, jobs = time.perf_counter(), phases.alone(planned, world_size)
        for number, (job, size) in enumerate(jobs):
            if len(jobs) > 1:
                print(f"\ntraining.phases.{number}: {job.training.steps:,} steps\n")
            _plan(job, stage, size)
        _print_command(planned, world_size)
        print(f"\nplanned in {time.perf_counter() - started:.1f} s")


def _check_steps(stage: PlanConfig, planned: RunConfig) -> None:
    """Refuse a command line with stage.tokens and another number of training.steps."""
    given = next((word for word in compose.task_arguments() if re.match(r"[+]*training[.]steps=", word)), None)
    if stage.tokens and given and given.partition("=")[2] != str(planned.training.steps):
        rule = f"are training.steps={planned.training.steps}, and the command line has {given}"
        raise UserError.of("stage.tokens", stage.tokens, rule, "remove one of them")


def _plan(config: RunConfig, stage: PlanConfig, world_size: int) -> None:
    """Print the plan of the configured job, or of one of its phases, and refuse one that does not fit."""
    result = plan(config, world_size, hardware_of(config))
    rows, costs = table(result), cost(result)
    starts = result.estimate.fits or not config.cluster.check_memory
    print("\n".join(plan_report.lines(result, rows, costs, starts=starts)), flush=True)
    if stage.plot:
        plan_report.draw(result, rows, Path(stage.plot))
        print(f"\nroofline\n{stage.plot}")
    if stage.out:
        write_json(Path(stage.out), plan_report.content(result, rows, costs))
    if refused := memory_check.violation(config, world_size, result):
        raise UserError([refused])


def _compare(config: RunConfig, run_dir: Path, out: str | None) -> None:
    """Print the plan of a job that has run beside its measured step time and memory; cluster.hardware replaces that of the run.

    With cluster.correction, the run is added to this file, and the correction that follows is printed.
    """
    run, planned = measured_report.compare(config, run_dir)
    print("\n".join(measured_report.lines(run_dir, run, planned)))
    correction, path = None, config.cluster.correction
    if path is not None:
        correction = measured_report.correct(config, run_dir, run, planned)
        print("\n".join(["", *measured_report.correction_lines(path, correction)]))
    if out:
        write_json(Path(out), measured_report.content(run, planned, correction))


def _search(config: RunConfig, stage: PlanConfig, world_size: int) -> None:
    """Print the fastest layouts."""
    result = plan_report.search_layouts(config, world_size)
    best = result.choices[0].plan.config
    print("\n".join(plan_report.search_lines(result)))
    _print_command(best, world_size)
    if stage.plot:
        draw_search(result, Path(stage.plot))
        print(f"\ntime and memory\n{stage.plot}")
    if stage.out:
        write_json(Path(stage.out), [plan_report.choice_content(choice) for choice in result.choices])


def _scale(config: RunConfig, stage: PlanConfig) -> None:
    """Print the strong-scaling curve, each line when it is computed."""
    training, points = config.training, []
    tokens = warmup.samples(training, training.steps) * training.sample_length
    print(f"best layout for {tokens:.3g} tokens at a global batch of {training.global_batch_size:,} sequences")
    print(site_correction.factors_text(config))
    print(plan_report.SCALING_TITLES)
    for point in scaling_points(config):
        print(plan_report.scaling_line(point), flush=True)
        points.append(point)
    if not any(point.choice for point in points):
        rule = "no layout is legal with this batch and fits"
        raise UserError.of("cluster.nodes", config.cluster.nodes, rule, "use more nodes, or another training.global_batch_size")
    if stage.plot:
        draw_scaling(points, Path(stage.plot))
        print(f"\ntime over nodes\n{stage.plot}")
    if stage.out:
        write_json(Path(stage.out), [plan_report.scaling_content(point) for point in points])


def _print_command(planned: RunConfig, world_size: int) -> None:
    """Print the command that starts a planned job: the arguments of this stage, with the planned layout and number of steps."""
    arguments = compose.job_arguments(compose.task_arguments(), planned, (*CHOSEN, "training.steps"))
    lines = live.lines(planned, world_size, arguments, has_weights=finetuning.has_weights(planned))
    print("\n".join(["", "submit", *lines]))
