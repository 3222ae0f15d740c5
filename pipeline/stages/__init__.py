"""The stages, one file each; run() starts the configured one."""

from __future__ import annotations

import importlib

from pipeline.config.schema import RunConfig
from pipeline.launch.ranks import Ranks


def run(config: RunConfig, ranks: Ranks) -> None:
    """Run the configured stage, or imagine it when dry_run is set."""
    name = "dry_run" if config.dry_run.enabled else config.stage.name
    importlib.import_module(f"pipeline.stages.{name}").run(config, ranks)
