"""Whether a training job would fit in the memory of its GPUs, before it is submitted."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from pipeline.common.errors import UserError, Violation
from pipeline.config.schema import RunConfig
from pipeline.config.stages import TRAINING_STAGES
from pipeline.launch import moldable

log = logging.getLogger("pipeline")


def violations(config: RunConfig, overrides: Sequence[str]) -> Iterator[Violation]:
    """Yield why a training job would not fit on the most nodes that it asks for, or on the fewest, if the GPU of the cluster is known.

    Args:
        config: of the job.
        overrides: arguments of `python -m pipeline`.
    """
    if config.stage.name in TRAINING_STAGES and config.cluster.hardware and config.cluster.check_memory:
        for nodes in {None, moldable.cluster_at(config).min_nodes}:
            if refused := violation(*moldable.expected(config, overrides, nodes)):
                yield refused


def violation(config: RunConfig, size: int) -> Violation | None:
    """Return why a job would not fit in the memory of its GPUs; None if it fits, or fine-tunes weights that do not exist yet.

    Args:
        config: of the job.
        size: number of its ranks.
    """
    from pipeline.planner import memory_check  # loads torch
    from pipeline.training import finetuning

    if config.stage.name == "finetune":
        try:
            config = finetuning.complete(config, size)
        except UserError as error:  # an earlier job of a chain may write the checkpoint; the job itself refuses everything else
            log.warning("%s: whether it fits in memory is not checked: %s", config.run_dir, error.violations[0])
            return None
    return memory_check.violation(config, size, memory_check.planned(config, size))
