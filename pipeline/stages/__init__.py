"""The stages, one file per stage. run() starts the configured stage."""

from __future__ import annotations

import importlib

from pipeline.common.ranks import Ranks
from pipeline.config.schema import RunConfig
from pipeline.config.stages import GPU_STAGES


def run(config: RunConfig, ranks: Ranks) -> None:
    """Run the configured stage, or the dry run if dry_run.enabled is set.

    Raises:
        UserError: the stage uses GPUs, the cluster has some, and this rank has none; else as the stage.
    """
    name = "dry_run" if config.dry_run.enabled else config.stage.name
    if name in GPU_STAGES and config.cluster.gpus_per_node:
        from pipeline.parallel import device  # loads torch

        device.check_gpus(config.cluster)
    importlib.import_module(f"pipeline.stages.{name}").run(config, ranks)
