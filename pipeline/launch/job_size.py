"""The size of the job of a configuration: its sbatch options, its layout and its ranks, before Slurm grants the nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pipeline.config import layout
from pipeline.config.cluster import ClusterConfig
from pipeline.config.schema import DryRunConfig, RunConfig
from pipeline.config.stages import TRAINING_STAGES
from pipeline.launch import job, live, moldable


def options(config: RunConfig, own: Sequence[str]) -> ClusterConfig:
    """Return the sbatch options of a job, in the first queue that fits; where Slurm is installed, with the limits that it tells.

    Args:
        config: of the job.
        own: settings of this job alone (job.one_task).
    """
    cluster = live.corrected(job.one_task(moldable.cluster_at(config), config.stage.name, own))
    return job.placed(cluster, config.stage.name, cluster.nodes)


def expected(config: RunConfig, overrides: Sequence[str], own: Sequence[str]) -> tuple[RunConfig, int]:
    """Return the configuration with its layout, and the number of ranks, of a job that gets the nodes that it asks for.

    For a stage that is about another job, such as certify, it is the number of ranks of that job.

    Args:
        config: of the job.
        overrides: arguments of `python -m pipeline`.
        own: as of `options`.
    """
    if config.stage.name in TRAINING_STAGES:
        return moldable.expected(config, overrides)
    size = options(config, own)
    return config, layout.job_size(dataclasses.replace(config, dry_run=DryRunConfig()), size.nodes * size.tasks_per_node)
