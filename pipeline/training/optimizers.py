"""The optimizers: how each is built, and the state that it keeps for every weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.config.optimizer import OptimizerConfig
from pipeline.training.elementwise_optimizers import AdEMAMix, EagerAdamW, Groups, Lion
from pipeline.training.muon import MATRIX_STATE, Muon
from pipeline.training.schedule_free import ScheduleFree, gradient_point


@dataclass(frozen=True)
class OptimizerKind:
    """One optimizer.

    Attributes:
        build: (parameter groups, configuration, learning rate, number of steps of the run) -> optimizer.
        state: keys of the fp32 tensors in optimizer.state[weight], each of the shape of the weight: ZeRO shards them by element like the
            weight, checkpoints store them beside it, and the planner counts their bytes.
        matrix_state: the same for the weights that Muon updates; None where there are none.
        gradient_point: (weight and its state by key, configuration) -> the fp32 values that the forward pass of training reads, a new
            tensor; None if it reads the weights.
    """

    build: Callable[[Groups, OptimizerConfig, float | Tensor, int], torch.optim.Optimizer]
    state: tuple[str, ...]
    matrix_state: tuple[str, ...] | None = None
    gradient_point: Callable[[Mapping[str, Tensor], OptimizerConfig], Tensor] | None = None

    def state_of(self, *, muon: bool) -> tuple[str, ...]:
        """The keys of a weight: of one that Muon updates, or of another one."""
        return self.matrix_state if muon and self.matrix_state is not None else self.state


def adamw(groups: Groups, config: OptimizerConfig, lr: float | Tensor, _steps: int = 0) -> torch.optim.AdamW:
    """PyTorch's fused AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101)."""
    return EagerAdamW(groups, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)


def ademamix(groups: Groups, config: OptimizerConfig, lr: float | Tensor, steps: int) -> AdEMAMix:
    """See AdEMAMix; its warm-up has the length of the run unless optimizer.slow_warmup_steps is set."""
    betas = config.beta1, config.beta2, config.beta3
    return AdEMAMix(groups, lr, betas, config.alpha, config.eps, config.slow_warmup_steps or max(steps, 1))


def lion(groups: Groups, config: OptimizerConfig, lr: float | Tensor, _steps: int) -> Lion:
    """See Lion."""
    return Lion(groups, lr, (config.beta1, config.beta2))


def muon(groups: Groups, config: OptimizerConfig, lr: float | Tensor, _steps: int) -> Muon:
    """See Muon."""
    return Muon(groups, config, lr)


def schedule_free(groups: Groups, config: OptimizerConfig, lr: float | Tensor, steps: int) -> ScheduleFree:
    """See ScheduleFree."""
    return ScheduleFree(groups, lr, config, steps)


#: optimizer.name -> optimizer
OPTIMIZERS = {
    "adamw": OptimizerKind(adamw, state=("exp_avg", "exp_avg_sq")),
    "ademamix": OptimizerKind(ademamix, state=AdEMAMix.names),
    "lion": OptimizerKind(lion, state=Lion.names),
    "muon": OptimizerKind(muon, state=("exp_avg", "exp_avg_sq"), matrix_state=MATRIX_STATE),
    "schedule_free": OptimizerKind(schedule_free, state=ScheduleFree.names, gradient_point=gradient_point),
}
