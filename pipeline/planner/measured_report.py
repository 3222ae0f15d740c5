"""The plan of a job that has run beside its measured step time and memory (stage=plan stage.run)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pipeline.common import artifact, events, metrics_file
from pipeline.common.errors import UserError
from pipeline.config import hardware as hardware_files
from pipeline.config import saved
from pipeline.config.cluster import ClusterConfig
from pipeline.config.hardware import Hardware
from pipeline.config.schema import RunConfig
from pipeline.planner import site_correction
from pipeline.planner.plan import JobPlan, hardware_of, plan
from pipeline.planner.site_correction import Anchor, SiteCorrection, memory_range, time_range

GB = 1e9


def compare(config: RunConfig, run_dir: Path) -> tuple[MeasuredRun, JobPlan]:
    """Return a job as it was measured, and its plan.

    Args:
        config: of this command: its cluster.hardware replaces that of the run.

    Raises:
        UserError: run_dir has no configuration or too few steps, or no hardware is named.
    """
    job = read(run_dir)
    cluster = _cluster(config, job)
    if cluster.correction is not None and not Path(cluster.correction).exists():  # the first run, which writes it
        cluster = replace(cluster, correction=None)
    planned = replace(job.config, cluster=cluster)
    return job, plan(planned, job.world_size, hardware_of(planned))


def _cluster(config: RunConfig, job: MeasuredRun) -> ClusterConfig:
    """Return the cluster of this command if it names a GPU, else that of the run; with the correction of this command."""
    cluster = config.cluster if config.cluster.hardware else job.config.cluster
    return replace(cluster, correction=config.cluster.correction)


def correct(config: RunConfig, run_dir: Path, job: MeasuredRun, planned: JobPlan) -> SiteCorrection:
    """Add a measured run to the file of cluster.correction, and return what it has then.

    Args:
        config: of this command, with cluster.correction.

    Raises:
        UserError: the run was on another GPU than the one that the file, cluster.hardware or its recorded device names, or takes far longer
            or shorter than planned; or the file is damaged or cannot be written.
    """
    cluster = _cluster(config, job)
    assert cluster.correction is not None
    assert cluster.hardware is not None
    path = Path(cluster.correction)
    before = site_correction.read(path) if path.exists() else None
    base = hardware_files.of_cluster(cluster)
    _check_gpu(run_dir, job, cluster.hardware, base, before)

    def seconds(hardware: Hardware) -> float:
        return plan(job.config, job.world_size, hardware, planned.trace).estimate.step_time

    anchor = Anchor.of(job.step_time, base, seconds, str(run_dir.resolve()), job.world_size)
    correction = site_correction.added(before, cluster.hardware, anchor)
    site_correction.write(path, correction)
    return correction


def _check_gpu(run_dir: Path, job: MeasuredRun, name: str, hardware: Hardware, before: SiteCorrection | None) -> None:
    """Refuse a run on another GPU."""
    fix = "plan with the GPU of the run (cluster.hardware), and another file of cluster.correction for each GPU"
    ran = job.config.cluster.hardware
    if job.gpu is not None:
        known_gpu = hardware_files.of_device(job.gpu)
        if hardware.device and (known_gpu is None or known_gpu.device != hardware.device):
            raise UserError.of("stage.run", run_dir, f"ran on {job.gpu}, and cluster.hardware={name} is {hardware.name}", fix)
    elif ran is not None and ran != name:
        raise UserError.of("stage.run", run_dir, f"ran with cluster.hardware={ran}, and this command has cluster.hardware={name}", fix)
    if before is not None and before.hardware != name:
        rule = f"has runs on {before.hardware}, and this run was on {name}"
        raise UserError.of("cluster.correction", before.runs[0].run if before.runs else "?", rule, fix)


def correction_lines(path: str, correction: SiteCorrection) -> Iterator[str]:
    """Yield the correction of a site and the runs that it follows from."""
    yield f"correction of {correction.hardware} by {len(correction.runs):,} runs, for plans with cluster.correction={path}"
    yield f"  time of kernels x {correction.compute:.3f}, of collectives x {correction.fabric:.3f}"
    for run in correction.runs:
        after = run.planned_s * correction.compute ** (1 - run.fabric_share) * correction.fabric**run.fabric_share
        ratios = f"planned / measured {run.planned_s / run.measured_s:.3f}, corrected {after / run.measured_s:.3f}"
        yield f"  {run.ranks:>8,} ranks  {ratios}  {run.run}"


def content(job: MeasuredRun, planned: JobPlan, correction: SiteCorrection | None = None) -> dict[str, object]:
    """Return the table as JSON."""
    return {
        "hardware": planned.hardware.name,
        "ranks": job.world_size,
        "steps": job.steps,
        "planned": {
            "step_time_s": planned.estimate.step_time,
            "step_time_range_s": time_range(planned.estimate.step_time, planned.config),
            "memory_bytes": planned.estimate.memory.total,
            "memory_range_bytes": memory_range(planned.estimate.memory.total),
        },
        "measured": {"step_time_s": job.step_time, "memory_bytes": job.memory},
        "correction": None if correction is None else asdict(correction),
    }


def lines(run_dir: Path, job: MeasuredRun, planned: JobPlan) -> Iterator[str]:
    """Yield the table."""
    yield f"{run_dir}: {job.world_size:,} x {planned.hardware.name}, median of {job.steps:,} steps after the first {WARMUP}"
    yield f"  {'':<10}{'planned':>14}{'measured':>14}{'planned / measured':>22}"
    seconds = planned.estimate.step_time
    yield f"  {'step':<10}{seconds:>12.4f} s{job.step_time:>12.4f} s{seconds / job.step_time:>22.3f}"
    low, high = time_range(seconds, planned.config)
    contains = "contains" if low <= job.step_time <= high else "DOES NOT CONTAIN"
    yield f"  {'range':<10}{low:>12.4f} to {high:.4f} s {contains} the measured time"
    memory = planned.estimate.memory.total
    if job.memory is None:
        yield f"  {'memory':<10}{memory / GB:>11.2f} GB{'not measured':>14}"
    else:
        yield f"  {'memory':<10}{memory / GB:>11.2f} GB{job.memory / GB:>11.2f} GB{memory / job.memory:>22.3f}"
    low, high = memory_range(memory / GB)
    yield f"  {'range':<10}{low:>11.2f} to {high:.2f} GB"


#: Steps at the beginning of a run that are not measured: kernels are compiled and memory is allocated.
WARMUP = 3


@dataclass(frozen=True)
class MeasuredRun:
    """What a run directory tells.

    Attributes:
        world_size: ranks of the last job; those of its cluster settings while it has not finished.
        step_time: their median, seconds.
        memory: most bytes that rank 0 reserved on its GPU; None for a CPU.
        gpu: name of the GPU of rank 0 in CUDA; None for a CPU, and for a run that did not record it.
    """

    config: RunConfig
    world_size: int
    steps: int
    step_time: float
    memory: float | None
    gpu: str | None = None


def read(run_dir: Path) -> MeasuredRun:
    """Read a run directory of `pretrain` or `finetune`.

    Raises:
        UserError: it has no configuration or no steps after the first ones.
    """
    config = saved.read(run_dir, "stage.run")
    lines = [line for line in metrics_file.read(run_dir) if "seconds" in line][WARMUP:]
    if not lines:
        rule = f"has no metrics.jsonl with more than {WARMUP} steps"
        raise UserError.of("stage.run", run_dir, rule, "pass the run_dir of a pretrain job that has trained longer")
    memory = max((line.get("memory_gb") or 0.0 for line in lines), default=0.0) * 1e9
    seconds = [line["seconds"] for line in lines]
    starts = [event for event in events.read(run_dir) if event["event"] == "run_start"]
    gpu = starts[-1].get("gpu") if starts else None
    return MeasuredRun(config, _world_size(run_dir, config), len(lines), statistics.median(seconds), memory or None, gpu)


def _world_size(run_dir: Path, config: RunConfig) -> int:
    """Ranks of a run."""
    if (run_dir / artifact.MANIFEST).is_file():
        return int(artifact.read(run_dir, key="stage.run", stage=config.stage.name).totals["world_size"])
    return config.cluster.nodes * max(1, config.cluster.tasks_per_node)
