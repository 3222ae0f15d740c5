"""The runs of a sweep: their configurations, and what is verified of all of them before the first one starts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, open_dict

from pipeline.config.schema import RunConfig
from pipeline.config.stages import TRAINING_STAGES
from pipeline.launch.sweep_manifest import Entry, Manifest
from pipeline.launch.sweep_table import Point


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep.

    Attributes:
        overrides: command-line overrides, without those of Hydra itself.
        composed: configuration composed by Hydra, with the run_dir of this run.
        config: the same configuration as dataclasses.
        entry: its place in the manifest of the sweep.
    """

    overrides: tuple[str, ...]
    composed: DictConfig
    config: RunConfig
    entry: Entry


def points_of(runs: Sequence[SweepRun], manifest: Manifest, states: Sequence[str] | None = None) -> list[Point]:
    """Return the runs as points of the table, with the settings that not all points of the sweep have.

    Args:
        runs: of the sweep.
        manifest: of the sweep.
        states: of the runs; default: their files tell.
    """
    values = manifest.differing()
    points = []
    for run, state in zip(runs, states or [""] * len(runs), strict=True):
        steps = run.config.training.steps if run.config.stage.name in TRAINING_STAGES else None
        points.append(Point(Path(run.config.run_dir), values[run.entry.id], steps, state))
    return points


def check_fork(config: RunConfig) -> None:
    """Refuse a point whose checkpoint.fork is not there, except in a dry run, or if its job waits for another one, which may write it.

    Raises:
        UserError: see there; or no step is left to train.
    """
    waits = any(option.startswith(("--dependency", "-d")) for option in config.cluster.sbatch)
    if config.stage.name in TRAINING_STAGES and config.checkpoint.fork is not None and not (waits or config.dry_run.enabled):
        from pipeline.training import starting_checkpoint as starting  # loads torch

        starting.parent_of(config, starting.starting_checkpoint(Path(config.run_dir), config.checkpoint))


def without_hydra(composed: DictConfig) -> DictConfig:
    """Return the configuration without the node hydra."""
    task = copy.deepcopy(composed)
    with open_dict(task):
        del task["hydra"]
    return task
