"""certify: settings of a planned pretrain job -> run_dir/certificate.json, by training a small version of it on this machine's CPU."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import torch

from pipeline.certification.certificate import certify, coverage, table
from pipeline.certification.certificate_file import content
from pipeline.common.atomic_files import atomic_file, make_folder, report_disk_full
from pipeline.common.errors import CheckFailed, UserError
from pipeline.common.ranks import Ranks
from pipeline.config import compose
from pipeline.config.layout import Coordinates, Layout, job_size
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Certify
from pipeline.launch.certified import FILE
from pipeline.parallel import float8
from pipeline.parallel.parallelize import partition_model

log = logging.getLogger("pipeline")


def run(config: RunConfig, ranks: Ranks) -> None:
    """Write run_dir/certificate.json, also if the job is not certified.

    Raises:
        UserError: this process is one of several ranks, or fp8 does not support the sizes of the job.
        CheckFailed: the layout differs from the plain loop by more than rounding, or its ranks failed.
    """
    stage = config.stage
    assert isinstance(stage, Certify)
    world_size = job_size(config, ranks.world_size)
    if ranks.world_size > 1:
        rule = "starts the ranks of the small job itself, on this machine"
        raise UserError.of("world size", ranks.world_size, rule, "run it as one process; stage.world_size is the size of the planned job")
    layout = Layout.of(config, world_size)
    check_fp8(config, layout)
    make_folder(Path(config.run_dir))
    zero = layout.zero_text(config.parallel.zero_stage)
    log.info("certify: %s on %d ranks, %s, %s", config.model.family, world_size, layout.axes_text(), zero)
    started = time.perf_counter()
    certificate = certify(config, world_size, steps=stage.steps, seconds=60 * stage.timeout_minutes, skip=stage.skip)
    seconds = time.perf_counter() - started
    path = Path(config.run_dir) / FILE
    with report_disk_full(path.parent), atomic_file(path, "w") as handle:
        json.dump(content(config, layout, compose.task_arguments(), certificate, seconds), handle, indent=1, allow_nan=False)
        handle.write("\n")
    small = Layout.of(certificate.small.config, certificate.small.world_size)
    shrunk = f"trained {stage.steps} steps with {small.axes_text()} on {small.world_size} ranks of this machine in {seconds:.0f} s"
    if certificate.failures:
        lines = [f"certify: {shrunk}; not certified:", *(f"  - {failure}" for failure in certificate.failures), f"see {path}"]
        raise CheckFailed("\n".join(lines))
    print("\n".join([shrunk, *table(certificate), *coverage(certificate), f"certified: {path}"]))


def check_fp8(config: RunConfig, layout: Layout) -> None:
    """Refuse a job with a matrix whose sizes fp8 products do not support.

    Raises:
        UserError: there is one.
    """
    if config.precision.fp8 == "none":
        return
    for pipeline in range(layout.pipeline):
        rank = layout.rank(Coordinates(pipeline, 0, 0, 0, 0))
        for stage in partition_model(config, layout, rank).stage_modules():
            float8.apply(stage, config.precision, config.model.layers, torch.device("meta"))
