"""Everything about a configuration that is refused before work starts: ranges, rules between keys, and the objective's rules."""

from __future__ import annotations

import logging

from pipeline.common import knobs
from pipeline.common.errors import UserError, Violation
from pipeline.common.ranks import Ranks
from pipeline.config import check as rules
from pipeline.config.schema import RunConfig
from pipeline.config.stages import GPU_STAGES, PARALLEL_STAGES

log = logging.getLogger("pipeline")

#: Groups whose keys occur in rules between keys, which assume that every value is in its range.
_RELATED = ("clean", "data", "dedup", "model", "tokenizer", "parallel", "training")


def check(config: RunConfig, world_size: int) -> None:
    """Refuse an illegal configuration.

    Args:
        config: the composed configuration.
        world_size: ranks of the job.

    Raises:
        UserError: with every violation found.
    """
    if found := violations(config, world_size):
        raise UserError(found)


def warn_of_other_size(config: RunConfig, here: Ranks) -> None:
    """Warn on rank 0 if a job of srun has another size than its cluster=NAME: sbatch does not read conf/cluster/."""
    nodes, tasks = config.cluster.nodes, config.cluster.tasks_per_node
    trains = here.launcher == "srun" and here.rank == 0 and config.stage.name in GPU_STAGES
    if trains and config.cluster.name != "local" and here.world_size != nodes * tasks:
        size = f"cluster={config.cluster.name} has {nodes} nodes x {tasks} tasks"
        log.warning("this job has %d ranks, %s: sbatch does not read conf/cluster; dry_run=true prints its options", here.world_size, size)


def violations(config: RunConfig, world_size: int) -> list[Violation]:
    """Every rule that the configuration breaks. Rules between keys are checked once every value is in its range."""
    found = knobs.range_violations(config)
    if any(violation.key.partition(".")[0] in _RELATED for violation in found):
        return found
    found += rules.violations(config, world_size)
    if config.stage.name in PARALLEL_STAGES:
        found += _objective_violations(config)
    return found


def training_violations(config: RunConfig, world_size: int) -> list[Violation]:
    """Every rule of training that a configuration breaks, for a model that is read from a checkpoint."""
    return [*rules.training_violations(config, world_size), *_objective_violations(config)]


def _objective_violations(config: RunConfig) -> list[Violation]:
    from pipeline.data.load.objectives.registry import objective_of  # loads NumPy, which most stages do not need here

    return list(objective_of(config).violations(config))
