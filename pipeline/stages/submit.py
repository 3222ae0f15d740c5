"""submit: settings of the other stages -> a chain of Slurm jobs, and run_dir/submission.json."""

from __future__ import annotations

from pipeline.common.ranks import Ranks
from pipeline.config import compose
from pipeline.config.schema import RunConfig
from pipeline.launch import submit_chain


def run(config: RunConfig, ranks: Ranks) -> None:
    """Submit the chain; see submit_chain.run."""
    submit_chain.run(config, compose.task_arguments(), ranks.world_size)
