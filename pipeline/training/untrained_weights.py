"""Weights that are trained and do not change, or never have a gradient: named in the log and in events.jsonl, and training goes on.

A loss whose weight is zero for a while, or an expert without tokens, has such weights by right; a module that is left out of the loss by
mistake has them too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.common import events
from pipeline.config.optimizer import OPTIMIZERS
from pipeline.config.schema import RunConfig
from pipeline.training.engine import StepResult
from pipeline.training.trainer import Trainer

log = logging.getLogger("pipeline")

#: Most weights that a message names.
_NAMED = 5
#: Updates before a weight without a gradient is named: a weight behind one that is initially zero gets its first gradient later.
_EARLIEST = 10
#: Smallest learning rate of a step for which weights must have changed: smaller updates may be less than the rounding of a weight.
_LEAST_RATE = 1e-6


class UntrainedWeights:
    """Names the weights that did not change since the last check, and those that never had a gradient.

    Args:
        config: of the run.
        trainer: whose weights are checked.
    """

    def __init__(self, config: RunConfig, trainer: Trainer) -> None:
        self._run_dir, self._trainer, self._mesh = Path(config.run_dir), trainer, trainer.mesh
        self._moment = OPTIMIZERS[config.optimizer.name].state[0]
        self._before: tuple[int, Tensor] | None = None

    def check(self, step: int, names: Sequence[str], digests: Tensor, result: StepResult) -> None:
        """Check the weights after a step. Collective.

        Args:
            step: steps with this one.
            names: of this rank's weights, in the same order on all data and tensor ranks.
            digests: of their master weights, int64 (weights,).
            result: of the step.
        """
        before, self._before = self._before, (step, digests)
        if before is None or float(result.lr) < _LEAST_RATE or bool(result.skipped) or self._trainer.engine.updates() < _EARLIEST:
            return
        last, values = before
        alive = torch.stack([values != digests, self._have_moments(names)]).long()
        for group in (self._mesh.dense, self._mesh.tensor):
            if group.size() > 1:
                dist.all_reduce(alive, dist.ReduceOp.MAX, group=group)
        found = (alive == 0).any().long()
        for group in self._mesh.all_ranks if self._mesh.layout.world_size > 1 else ():
            dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
        if int(found):
            self._tell(step, last, [[name for name, lives in zip(names, row, strict=True) if not lives] for row in alive.tolist()])

    def _have_moments(self, names: Sequence[str]) -> Tensor:
        """Whether this rank has first moments of a weight other than zero, bool (weights,)."""
        found = dict.fromkeys(names, torch.zeros((), dtype=torch.bool, device=self._mesh.device))
        for fragment in self._trainer.engine.fragments():
            moments = fragment.tensors.get(self._moment)
            if isinstance(moments, Tensor):
                found[fragment.piece.name] = found[fragment.piece.name] | moments.any().to(self._mesh.device)
        return torch.stack([found[name] for name in names])

    def _tell(self, step: int, last: int, mine: list[list[str]]) -> None:
        """Record what all ranks found. Collective."""
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        if self._mesh.rank != 0:
            return
        for row, what in enumerate((f"did not change since step {last}", "never had a gradient")):
            found = list(dict.fromkeys(name for rank in ranks for name in rank[row]))
            if found:
                more = f" and {len(found) - _NAMED} others" if len(found) > _NAMED else ""
                log.warning("step %d: trained weights that %s: %s%s", step, what, ", ".join(found[:_NAMED]), more)
                events.record(self._run_dir, "untrained", step=step, what=what, weights=found)
