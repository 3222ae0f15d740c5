"""The step of the optimizer on fp32 master weights: one call for all of them, which does not wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from pipeline.config.optimizer import OPTIMIZERS, OptimizerConfig
from pipeline.config.training import TrainingConfig
from pipeline.training import gradient_clipping
from pipeline.training.elementwise_optimizers import AdEMAMix, EagerAdamW, Groups, Lion, ScheduleFree, create_state
from pipeline.training.gradient_clipping import is_skipped
from pipeline.training.loss_scale import LossScale
from pipeline.training.lr_schedule import learning_rate
from pipeline.training.muon import Muon
from pipeline.training.weight_averaging import WeightAverage

#: optimizer.name -> (parameter groups, configuration, learning rate, number of steps of the run) -> optimizer
BUILD: dict[str, Callable[[Groups, OptimizerConfig, Tensor, int], torch.optim.Optimizer]] = {
    "adamw": EagerAdamW,
    "ademamix": AdEMAMix,
    "lion": Lion,
    "muon": Muon,
    "schedule_free": ScheduleFree,
}


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step: 0-dim tensors, possibly still being computed on the device.

    Attributes:
        gradient_norm: global norm before clipping.
        skipped: 1 if the gradient was not finite and the step changed nothing, else 0.
        more: further values for metrics.jsonl, by key.
        requests: how many ranks made each request of Trainer.train.
    """

    gradient_norm: Tensor
    skipped: Tensor
    lr: Tensor
    more: dict[str, Tensor] = field(default_factory=dict)
    requests: Tensor = field(default_factory=lambda: torch.zeros(0))


class WeightUpdate:
    """Optimizer, learning rate, clipping, skipped steps and average of the weights. All of them are tensors on the device.

    Args:
        groups: parameter groups of the optimizer, one fp32 master weight each, with its `weight_decay`, whether Muon updates it (`muon`),
            and the factor of its learning rate (GroupRates).
        training: number of steps, over which the learning rate is scheduled, and the average.
        loss_scale: whose factor the gradients have.

    Attributes:
        after_update: called after an update with whether it was skipped, before the new weights are averaged or read.
    """

    def __init__(
        self, groups: Groups, optimizer: OptimizerConfig, training: TrainingConfig, loss_scale: LossScale, device: torch.device
    ) -> None:
        self._clipping = optimizer.gradient_clipping
        self._loss_scale = loss_scale
        # Without a number of steps, which training.epochs decides once the data is packed, the rate is that of the first update.
        rates = [learning_rate(update, optimizer, training) for update in range(max(training.steps, 1))]
        self._rates = torch.tensor(rates, dtype=torch.float32, device=device)
        self._updates = torch.zeros((), dtype=torch.int64, device=device)
        self._lr = torch.zeros((), dtype=torch.float32, device=device)
        self._group_rates = GroupRates(groups, self._lr)
        self.after_update: Callable[[Tensor], None] = lambda _: None
        self.kind = OPTIMIZERS[optimizer.name]
        self.optimizer: Any = BUILD[optimizer.name](groups, optimizer, self._lr, training.steps)
        self._masters: list[Tensor] = [master for group in self.optimizer.param_groups for master in group["params"]]
        # The optimizer calls a kernel for each of its groups, and ZeRO has one for each bucket.
        merged: dict[tuple[float, bool, float], dict[str, Any]] = {}
        for group in self.optimizer.param_groups:
            kept = merged.setdefault(key(group), {**group, "params": []})
            kept["params"] += group["params"]
        self._merged = list(merged.values())
        self.average = WeightAverage(training, self._masters)

    @torch.no_grad()
    def step(self, norm: Tensor, gradients: Sequence[Tensor | None]) -> StepResult:
        """Update the master weights, unless the norm is not finite.

        Clipping is passed as the optimizer's grad_scale and skipping as found_inf: neither reads the gradients once more.

        Args:
            norm: of the full gradient, without the loss scale; 0-dim.
            gradients: of the master weights, fp32.
        """
        skipped = self._prepare(norm, self._loss_scale.factor)
        for master, gradient in zip(self._masters, gradients, strict=True):
            master.grad = gradient
        groups, self.optimizer.param_groups = self.optimizer.param_groups, self._merged
        self.optimizer.step()
        self.optimizer.param_groups = groups
        for master in self._masters:
            master.grad = None
        self._updates += (1 - skipped).long()
        self.after_update(skipped)
        self.average.update(skipped)
        self._loss_scale.update(skipped)
        return StepResult(norm, skipped, self._lr.clone())

    def _prepare(self, norm: Tensor, loss_scale: Tensor | None) -> Tensor:
        """Set the learning rate, clipping and skipping of an update. Returns 1.0 if it is skipped, else 0.0, 0-dim."""
        skipped = is_skipped(norm)
        self._lr.copy_(self._rates.take(self._updates.clamp(max=len(self._rates) - 1)))  # indexing by a tensor would synchronize
        self._group_rates.update()
        self.optimizer.found_inf = skipped
        self.optimizer.grad_scale = gradient_clipping.divisor(norm, self._clipping, loss_scale)
        return skipped

    def state(self, index: int) -> dict[str, Tensor]:
        """A master weight and what is kept for it: the entries of Fragment.tensors, flat views."""
        master = self._masters[index]
        state = self.optimizer.state[master]
        kept = {name: state[name].view(-1) for name in self.kind.state if name in state}
        return {"weight": master.detach().view(-1), **kept, **self.average.tensors(index)}

    def gradient_point(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """See Engine."""
        point: Tensor = self.optimizer.gradient_point(tensors) if self.kind.separate else tensors["weight"]
        return point

    def create_state(self) -> None:
        """Create what the optimizer keeps before its first step, so that a checkpoint can be loaded into it."""
        for group in self.optimizer.param_groups:
            create_state(self.optimizer, self.kind.state_of(muon=group["muon"]), group["params"])

    def updates(self) -> int:
        """See Engine."""
        return int(self._updates.item())

    def counters(self) -> Tensor:
        """See Engine."""
        return torch.cat([self._updates.double()[None], self._loss_scale.counters(self._updates.device)])

    @torch.no_grad()
    def loaded(self, updates: int) -> None:
        """See Engine."""
        self._updates.fill_(updates)
        for master in self._masters:
            self.optimizer.state[master]["step"].fill_(updates)


class GroupRates:
    """The learning rates of the groups, 0-dim tensors on the device: the scheduled one times the factor `rate` of a group.

    The weight decay of a group is divided by its factor: AdamW multiplies it by the learning rate, and the product, the share by which a
    step reduces a weight, stays that of the run (Wang & Aitchison 2024, https://arxiv.org/abs/2405.13698; CompleteP, table 1).

    Args:
        groups: get the key lr, and their weight_decay changes. Without a key `rate` the factor is 1.
        lr: the scheduled learning rate, 0-dim.
    """

    def __init__(self, groups: Groups, lr: Tensor) -> None:
        self._lr = lr
        factors = sorted({_factor(group) for group in groups} - {1.0})
        self._factors = torch.tensor(factors, dtype=lr.dtype, device=lr.device)
        self._scaled = torch.zeros_like(self._factors)
        rates = {1.0: lr, **dict(zip(factors, self._scaled.unbind(), strict=True))}
        for group in groups:
            group["lr"] = rates[_factor(group)]
            group["weight_decay"] = cast(float, group["weight_decay"]) / _factor(group)

    def update(self) -> None:
        """Follow a change of the scheduled rate: one kernel for all groups, none if every factor is 1."""
        if len(self._factors):
            torch.mul(self._factors, self._lr, out=self._scaled)


def key(group: dict[str, Any]) -> tuple[float, bool, float]:
    """Groups of the same key are updated alike."""
    return group["weight_decay"], group["muon"], _factor(group)


def _factor(group: dict[str, Any]) -> float:
    return float(group.get("rate", 1.0))
