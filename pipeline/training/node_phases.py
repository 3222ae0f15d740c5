"""Phases of training.batch_rampup that name their nodes: a job trains until the run needs another number of nodes."""

from __future__ import annotations

from pipeline.common.errors import UserError
from pipeline.common.ranks import Ranks
from pipeline.config import layouts
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig


def last_step(config: RunConfig, step: int, ranks: Ranks) -> int | None:
    """Return the number of steps after which this job ends, so that the next one gets other nodes; None if it trains to the end.

    A job that has the nodes of the next phase already, and whose layout is legal there, goes on.

    Args:
        config: configuration of the run.
        step: steps that the run has made.
        ranks: of the job.

    Raises:
        UserError: the layout does not divide the batches of the phase that begins.
    """
    if not layouts.has_phases(config.training):
        return None
    if violations := check.size_violations(config, ranks.world_size, step):
        raise UserError(violations)
    nodes, end = -(-ranks.world_size // ranks.local_size), layouts.phase_end(config, step)
    while end is not None:
        if layouts.nodes_of_phase(config, end) != nodes or check.size_violations(config, ranks.world_size, end):
            return end
        end = layouts.phase_end(config, end)
    return None
