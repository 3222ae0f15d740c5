"""rehearse: settings of a planned training job -> run_dir/rehearsal.json, by running one of its ranks on a driver without a GPU."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.common import ends
from pipeline.common.atomic_files import make_folder, report_disk_full, write_json
from pipeline.common.errors import CheckFailed, UserError
from pipeline.common.ranks import Ranks
from pipeline.config import compose, hardware
from pipeline.config.layout import Layout, job_size
from pipeline.config.planned import planned_job
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Rehearse
from pipeline.rehearsal import start

log = logging.getLogger("pipeline")

FILE = "rehearsal.json"
TIMELINE = "timeline.html"


def run(config: RunConfig, ranks: Ranks) -> None:
    """Print a report of the rehearsal and write run_dir/rehearsal.json, in a child process with the driver.

    Raises:
        UserError: this process is one of several ranks, the GPU is not one of NVIDIA's, or there is no CUDA build of torch.
        CheckFailed: the rank does not fit on the device.
        SystemExit: the child process has failed, and has said why.
    """
    stage = config.stage
    assert isinstance(stage, Rehearse)
    if ranks.world_size > 1:
        rule = "rehearses one rank, on this machine"
        raise UserError.of("world size", ranks.world_size, rule, "run it as one process; stage.world_size is the size of the planned job")
    if start.is_active():
        _rehearse(config, stage)
        return
    if code := start.again(compose.task_arguments(), hardware.of_cluster(config.cluster), stage.python):
        sys.exit(code)


def _rehearse(config: RunConfig, stage: Rehearse) -> None:
    """Rehearse, in the process that has the driver."""
    from pipeline.planner import out_of_memory
    from pipeline.planner.out_of_memory import Used
    from pipeline.planner.plan import plan
    from pipeline.rehearsal import report, start_up, timeline
    from pipeline.rehearsal.memory import Moments
    from pipeline.rehearsal.rehearse import fullest_rank, rehearse
    from pipeline.training import finetuning

    imports = start_up.process_age()
    started, world_size, job = time.perf_counter(), job_size(config, 1), planned_job(config)
    if job.stage.name == "finetune":
        job = finetuning.planned(job, world_size)
    gpu = hardware.of_cluster(job.cluster)
    planned = plan(job, world_size, gpu)
    layout = Layout.of(job, world_size)
    rank = fullest_rank(layout, planned) if stage.rank is None else stage.rank
    log.info("rehearse: %s on %d ranks, %s, rank %d", job.model.family, world_size, layout.axes_text(), rank)
    outside = int(planned.estimate.memories[layout.coordinates(rank).pipeline].outside)
    moments = Moments()
    try:
        result = rehearse(job, world_size, rank, stage.steps, outside, moments, imports)
    except RuntimeError as error:
        if (of_gpu := out_of_memory.of_device(error)) is None:
            raise
        lines = [f"rehearse: rank {rank} does not fit: {out_of_memory.wanted(of_gpu)}", f"  at {ends.where(of_gpu)}"]
        lines += out_of_memory.table(planned, Used.of_this_gpu())
        _write(config, report.without_memory(planned, rank, moments, lines[0], compose.task_arguments()))
        raise CheckFailed("\n".join([*lines, *out_of_memory.fixes(job, world_size, gpu)])) from error
    _write(config, report.content(result, planned, compose.task_arguments(), time.perf_counter() - started))
    print("\n".join(report.lines(result, planned)))
    if result.seen.findings is not None:
        timeline.write(result.seen.findings, Path(config.run_dir) / TIMELINE)
        print("\n".join([*result.seen.findings.lines(), f"timeline: {Path(config.run_dir) / TIMELINE}, and as a Chrome trace beside it"]))
    print(f"rehearsed: {Path(config.run_dir) / FILE}")


def _write(config: RunConfig, content: dict[str, Any]) -> None:
    """Write rehearsal.json."""
    path = Path(config.run_dir) / FILE
    make_folder(path.parent)
    with report_disk_full(path.parent):
        write_json(path, content, allow_nan=False)
