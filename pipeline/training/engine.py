"""The interface between an engine, which owns the training state, and the loop and checkpoints; and the factory of engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pkgutil import resolve_name

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.checkpoint.fragment import Fragment
from pipeline.config.schema import RunConfig
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.parallelize import LocalModel
from pipeline.training.gradients import is_primary_copy

#: ZeRO stage -> engine, imported when it is built: only ZeRO 1 to 3 need DeepSpeed.
ENGINES = {0: "pipeline.training.replicated:ReplicatedEngine"} | dict.fromkeys((1, 2, 3), "pipeline.training.zero:ZeroEngine")

_LINEAR = F.linear

#: Names of a weight's tensors in the optimizer, beside the fp32 weight itself.
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did: 0-dim tensors that nobody has waited for.

    Attributes:
        gradient_norm: before clipping, over the whole model.
        skipped: 1 when the gradient was not finite and nothing was changed, else 0.
        lr: learning rate of the step.
        more: further numbers for metrics.jsonl, by their key there.
    """

    gradient_norm: Tensor
    skipped: Tensor
    lr: Tensor
    more: dict[str, Tensor] = field(default_factory=dict)


class Engine(ABC):
    """Owner of weights, gradients and optimizer state on this rank."""

    model: LocalModel

    @abstractmethod
    def accumulate(self) -> AbstractContextManager[None]:
        """Inside, backward passes add to the gradients; leaving reduces them over all ranks."""

    @abstractmethod
    def step(self) -> StepResult:
        """Clip by the global norm, update the weights, forget the gradients. A gradient that is not finite changes nothing."""

    @abstractmethod
    def fragments(self) -> list[Fragment]:
        """This rank's part of weights and optimizer state."""

    @abstractmethod
    def updates(self) -> int:
        """Updates made so far; skipped steps are none."""

    @abstractmethod
    def loaded(self, updates: int) -> None:
        """Take over the fragments that were written in place, as the state after `updates` updates."""


def build_engine(config: RunConfig, model: LocalModel, mesh: Mesh) -> Engine:
    """The engine of the configured ZeRO stage."""
    # ZeRO 3 replaces F.linear in the whole process by a version that adds the bias in place, to products kept by selective recomputation.
    F.linear = _LINEAR
    engine: Engine = resolve_name(ENGINES[config.parallel.zero_stage])(config, model, mesh)
    return engine


def create_moments(optimizer: torch.optim.Optimizer, masters: list[Tensor]) -> None:
    """Give AdamW its state before the first step, so that a checkpoint can be read into it."""
    for master in masters:
        if not optimizer.state[master]:
            optimizer.state[master] = {
                "step": torch.zeros((), device=master.device),
                **{name: torch.zeros_like(master) for name in MOMENTS},
            }


def fixed_fragments(model: LocalModel, mesh: Mesh) -> list[Fragment]:
    """The weights that no optimizer moves. A checkpoint keeps moments for them too, of zeros."""
    return [
        Fragment(
            piece,
            0,
            {"weight": value.view(-1), **{name: torch.zeros_like(value).view(-1) for name in MOMENTS}},
            owned=mesh.data.rank() == 0 and is_primary_copy(piece, mesh),
        )
        for value, piece in model.fixed.items()
    ]
