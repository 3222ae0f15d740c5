"""The stages, one file per stage. run() starts the configured stage."""

from __future__ import annotations

import importlib

from pipeline.common.ranks import Ranks
from pipeline.config.schema import RunConfig


def run(config: RunConfig, ranks: Ranks) -> None:
    """Run the configured stage, or the dry run if dry_run.enabled is set."""
    name = "dry_run" if config.dry_run.enabled else config.stage.name
    importlib.import_module(f"pipeline.stages.{name}").run(config, ranks)
