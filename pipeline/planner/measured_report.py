"""The plan of a job that has run beside its measured step time and memory (stage=plan stage.run)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pipeline.config.schema import RunConfig
from pipeline.planner import measured_run
from pipeline.planner.plan import JobPlan, hardware_of, plan

GB = 1e9


def compare(config: RunConfig, run_dir: Path) -> tuple[measured_run.MeasuredRun, JobPlan]:
    """Return a job as it was measured, and its plan.

    Args:
        config: of this command: its cluster.hardware replaces that of the run.
        run_dir: of the job.

    Raises:
        UserError: run_dir has no configuration or too few steps, or no hardware is named.
    """
    job = measured_run.read(run_dir)
    cluster = config.cluster if config.cluster.hardware else job.config.cluster
    return job, plan(job.config, job.world_size, hardware_of(replace(job.config, cluster=cluster)))


def content(job: measured_run.MeasuredRun, planned: JobPlan) -> dict[str, object]:
    """Return the table as JSON."""
    return {
        "hardware": planned.hardware.name,
        "ranks": job.world_size,
        "steps": job.steps,
        "planned": {"step_time_s": planned.estimate.step_time, "memory_bytes": planned.estimate.memory.total},
        "measured": {"step_time_s": job.step_time, "memory_bytes": job.memory},
    }


def lines(run_dir: Path, job: measured_run.MeasuredRun, planned: JobPlan) -> Iterator[str]:
    """Yield the table."""
    yield f"{run_dir}: {job.world_size:,} x {planned.hardware.name}, median of {job.steps:,} steps after the first {measured_run.WARMUP}"
    yield f"  {'':<10}{'planned':>14}{'measured':>14}{'planned / measured':>22}"
    seconds = planned.estimate.step_time
    yield f"  {'step':<10}{seconds:>12.4f} s{job.step_time:>12.4f} s{seconds / job.step_time:>22.3f}"
    memory = planned.estimate.memory.total
    if job.memory is None:
        yield f"  {'memory':<10}{memory / GB:>11.2f} GB{'not measured':>14}"
    else:
        yield f"  {'memory':<10}{memory / GB:>11.2f} GB{job.memory / GB:>11.2f} GB{memory / job.memory:>22.3f}"
