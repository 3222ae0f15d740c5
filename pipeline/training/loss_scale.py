"""The loss scale of fp16 (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.config.schema import PrecisionConfig


class LossScale:
    """A factor of the loss in the backward pass, by which the engine divides the gradients again; the same on all ranks.

    It is doubled after `window` consecutive steps with a finite gradient, and halved after a step without, but at least 1. It is updated on
    the device: whether a gradient is finite is known there, from the norm that all ranks share.

    Attributes:
        factor: 0-dim fp32, None in dtypes with the exponent range of fp32.
    """

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self.factor: Tensor | None = None
        self._window = config.loss_scale_window
        if config.dtype == "fp16":
            self.factor = torch.full((), config.initial_loss_scale, dtype=torch.float32, device=device)
            self._finite_steps = torch.zeros((), dtype=torch.float32, device=device)

    def divide(self, values: Tensor) -> Tensor:
        """Undo the factor."""
        return values if self.factor is None else values / self.factor

    def update(self, skipped: Tensor) -> None:
        """Adapt the factor after a step: `skipped`, 0-dim, is 1 if its gradient was not finite, else 0."""
        if self.factor is None:
            return
        finite_steps = (self._finite_steps + 1) * (1 - skipped)
        grows = finite_steps >= self._window
        # A new tensor: the caller may still read the old one.
        self.factor = torch.where(skipped > 0, (self.factor / 2).clamp(min=1), torch.where(grows, self.factor * 2, self.factor))
        self._finite_steps = finite_steps.masked_fill(grows, 0.0)

    def restore(self, before: LossScale) -> None:
        """Return to the state of a copy that was made before `update`."""
        self.factor = before.factor
        if before.factor is not None:
            self._finite_steps = before._finite_steps

    def state(self) -> tuple[float, int]:
        """The factor, 0 if there is none, and the number of consecutive steps with a finite gradient at this factor."""
        return (0.0, 0) if self.factor is None else (float(self.factor), int(self._finite_steps))

    def counters(self, device: torch.device) -> Tensor:
        """What `state` returns, fp64 (2,), on the device and without waiting for it."""
        if self.factor is None:
            return torch.zeros(2, dtype=torch.float64, device=device)
        return torch.stack([self.factor, self._finite_steps]).double()

    def load(self, factor: float, finite_steps: int) -> None:
        """Continue with a state, if it is one of fp16."""
        if self.factor is not None and factor > 0:
            self.factor = torch.full_like(self.factor, factor)
            self._finite_steps.fill_(finite_steps)
