"""certify: settings of a planned pretrain job -> run_dir/certificate.json, by training a small version of it on this machine's CPU."""

from __future__ import annotations

import dataclasses
import logging
import platform
import socket
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from pipeline.certification.certificate import Certificate, certify, coverage, table
from pipeline.certification.comparison import Difference
from pipeline.common.atomic_files import make_folder, report_disk_full, write_json
from pipeline.common.errors import CheckFailed, UserError
from pipeline.common.git_commit import commit
from pipeline.common.ranks import Ranks
from pipeline.config import compose, phases
from pipeline.config.layout import Coordinates, Layout, job_size
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Certify
from pipeline.launch import certified
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
    for job, size in phases.alone(config, world_size):
        check_fp8(job, Layout.of(job, size))
    make_folder(Path(config.run_dir))
    zero = layout.zero_text(config.parallel.zero_stage)
    log.info("certify: %s on %d ranks, %s, %s", config.model.family, world_size, layout.axes_text(), zero)
    started = time.perf_counter()
    certificate = certify(config, world_size, steps=stage.steps, seconds=60 * stage.timeout_minutes, skip=stage.skip)
    seconds = time.perf_counter() - started
    path = Path(config.run_dir) / FILE
    with report_disk_full(path.parent):
        write_json(path, content(config, layout, compose.task_arguments(), certificate, seconds), allow_nan=False)
    small = Layout.of(certificate.small.config, certificate.small.world_size)
    shrunk = f"trained {stage.steps} steps with {small.axes_text()} on {small.world_size} ranks of this machine in {seconds:.0f} s"
    if certificate.failures:
        lines = [f"certify: {shrunk}; not certified:", *(f"  - {failure}" for failure in certificate.failures), f"see {path}"]
        raise CheckFailed("\n".join(lines))
    print("\n".join([shrunk, *table(certificate), *coverage(certificate)]))
    for number, phase in certificate.phases.items():
        print("\n".join([f"training.phases.{number}:", *table(phase), *coverage(phase)]))
    print(f"certified: {path}")


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


def content(config: RunConfig, layout: Layout, overrides: list[str], certificate: Certificate, seconds: float) -> dict[str, Any]:
    """Return the certificate as values of JSON.

    Args:
        overrides: the command line, with --config-dir.
    """
    return {
        "certified": not certificate.failures,
        "failures": certificate.failures,
        "details": certificate.details,
        "planned": {
            "world_size": layout.world_size,
            "layout": dataclasses.asdict(layout),
            "overrides": overrides,
            "config": dataclasses.asdict(config),
        },
        **_trained(certificate),
        "phases": {number: _trained(phase) for number, phase in certificate.phases.items()},
        "data": {} if any(part.part == "data" and part.not_covered for part in certificate.parts) else certified.data_of(config),
        "versions": {name: version(name) for name in ("torch", "deepspeed", "numpy")} | {"python": platform.python_version()},
        "commit": commit(),
        "host": socket.gethostname(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
    }


def _trained(certificate: Certificate) -> dict[str, Any]:
    """Return what was trained and compared, of the run or of a phase, as values of JSON."""
    small = Layout.of(certificate.small.config, certificate.small.world_size)
    return {
        "small": {
            "world_size": small.world_size,
            "layout": dataclasses.asdict(small),
            "shrunk": [{"key": change.key, "from": change.planned, "to": change.small} for change in certificate.small.changes],
            "data": "random tokens; initial weights of the run with noise added to every element",
        },
        "comparisons": [
            {
                "precision": comparison.dtype,
                "method": comparison.method,
                "tolerances": comparison.tolerances,
                "differences": _values(comparison.differences),
                "rounding": _values(comparison.rounding),
            }
            for comparison in certificate.comparisons
        ],
        "parts": {
            part.part: {"covered": part.covered, "not_covered": part.not_covered, "failures": part.failures} for part in certificate.parts
        },
    }


def _values(differences: dict[str, Difference]) -> dict[str, dict[str, Any]]:
    """Return differences as values of JSON, which has no infinity."""
    return {name: {"value": d.value if d.value < float("inf") else "not finite", "where": d.where} for name, d in differences.items()}
