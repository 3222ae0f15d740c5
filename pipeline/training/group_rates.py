"""Learning rates of parameter groups whose weights have a factor of their own (Family.rate)."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from pipeline.training.elementwise_optimizers import Groups


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
