"""The stages, one file per stage. run() starts the configured stage."""

from __future__ import annotations

import importlib
from pathlib import Path

from pipeline.common.atomic_files import report_disk_full
from pipeline.common.ranks import Ranks
from pipeline.config.schema import RunConfig
from pipeline.config.stages import GPU_STAGES


def run(config: RunConfig, ranks: Ranks) -> None:
    """Run the configured stage, or the dry run if dry_run.enabled is set; submit has a dry run of its own.

    Raises:
        UserError: the stage uses GPUs, the cluster has some, and this rank has none; an output cannot be written; else as the stage.
    """
    name = "dry_run" if config.dry_run.enabled and config.stage.name != "submit" else config.stage.name
    if name in GPU_STAGES and name != "preflight" and config.cluster.gpus_per_node:  # preflight names the node without GPUs
        from pipeline.parallel import device  # loads torch

        device.check_gpus(config.cluster)
    with report_disk_full(Path(config.run_dir)):
        importlib.import_module(f"pipeline.stages.{name}").run(config, ranks)
