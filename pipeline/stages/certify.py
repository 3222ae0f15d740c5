"""certify: settings of a planned pretrain job -> run_dir/certificate.json, by training a small version of it on this machine's CPU."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import platform
import socket
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig

from pipeline.certification.certificate import Certificate, certify, table
from pipeline.certification.comparison import Difference
from pipeline.common.errors import CheckFailed, UserError
from pipeline.common.files import atomic_file, make_folder, report_disk_full
from pipeline.common.ranks import Ranks
from pipeline.config.layout import Layout, job_size
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Certify
from pipeline.stages.pretrain import commit

log = logging.getLogger("pipeline")

FILE = "certificate.json"
SPOIL = "PIPELINE_CERTIFY_SPOIL"
"""Environment variable of the tests: the name of a weight whose gradients one rank scales, so that the certificate is refused."""


def run(config: RunConfig, ranks: Ranks) -> None:
    """Write run_dir/certificate.json, also if the job is not certified.

    Raises:
        UserError: this process is one of several ranks.
        CheckFailed: the layout differs from the plain loop by more than rounding, or its ranks failed.
    """
    stage = config.stage
    assert isinstance(stage, Certify)
    world_size = job_size(config, ranks.world_size)
    if ranks.world_size > 1:
        rule = "starts the ranks of the small job itself, on this machine"
        raise UserError.of("world size", ranks.world_size, rule, "run it as one process; stage.world_size is the size of the planned job")
    make_folder(Path(config.run_dir))
    layout = Layout.of(config, world_size)
    log.info("certify: %s on %d ranks, %s, ZeRO %d", config.model.family, world_size, axes(layout), config.parallel.zero_stage)
    started = time.perf_counter()
    found = certify(config, world_size, steps=stage.steps, seconds=60 * stage.timeout_minutes, spoil=os.environ.get(SPOIL))
    seconds = time.perf_counter() - started
    path = Path(config.run_dir) / FILE
    with report_disk_full(path.parent), atomic_file(path, "w") as handle:
        json.dump(content(config, layout, found, seconds), handle, indent=1, allow_nan=False)
        handle.write("\n")
    small = Layout.of(found.small.config, found.small.world_size)
    shrunk = f"trained {stage.steps} steps with {axes(small)} on {found.small.world_size} ranks of this machine in {seconds:.0f} s"
    if found.failures:
        lines = [f"certify: {shrunk}; not certified:", *(f"  - {failure}" for failure in found.failures), f"see {path}"]
        raise CheckFailed("\n".join(lines))
    print("\n".join([shrunk, *table(found), f"certified: {path}"]))


def axes(layout: Layout) -> str:
    """Return the sizes of the axes in use."""
    sizes = {axis: getattr(layout, axis) for axis in ("tensor", "pipeline", "context", "expert", "data")}
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1 or axis == "data")


def content(config: RunConfig, layout: Layout, found: Certificate, seconds: float) -> dict[str, Any]:
    """Return the certificate as values of JSON."""
    small = Layout.of(found.small.config, found.small.world_size)
    return {
        "certified": not found.failures,
        "failures": found.failures,
        "details": found.details,
        "planned": {
            "world_size": layout.world_size,
            "layout": dataclasses.asdict(layout),
            "overrides": list(HydraConfig.get().overrides.task),
            "config": dataclasses.asdict(config),
        },
        "small": {
            "world_size": small.world_size,
            "layout": dataclasses.asdict(small),
            "shrunk": [{"key": change.key, "from": change.planned, "to": change.small} for change in found.small.changes],
            "data": "random tokens; initial weights of the run with noise added to every element",
        },
        "comparisons": [
            {
                "precision": comparison.dtype,
                "method": comparison.method,
                "tolerances": comparison.tolerances,
                "differences": _values(comparison.found),
                "rounding": _values(comparison.rounding),
            }
            for comparison in found.comparisons
        ],
        "versions": {name: version(name) for name in ("torch", "deepspeed", "numpy")} | {"python": platform.python_version()},
        "commit": commit(),
        "host": socket.gethostname(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
    }


def _values(found: dict[str, Difference]) -> dict[str, dict[str, Any]]:
    """Return differences as values of JSON, which has no infinity."""
    return {name: {"value": d.value if d.value < float("inf") else "not finite", "where": d.where} for name, d in found.items()}
