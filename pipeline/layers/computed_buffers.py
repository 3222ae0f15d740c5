"""Modules whose buffers are computed, not trained and not part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class ComputedBuffers(nn.Module):
    """A module with non-persistent fp32 buffers, computed on the CPU so that they are the same on every kind of device."""

    def compute_buffers(self, device: torch.device) -> None:
        """Compute the buffers on the CPU and move them to a device."""
        raise NotImplementedError

    def reset_buffers(self, device: torch.device) -> None:
        """Compute the buffers, except on the meta device, where they have no values: the tables of a long context would take seconds."""
        if device.type != "meta":
            self.compute_buffers(device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the model to its device (`to`, `to_empty`), but not to its dtype (`bfloat16`)."""
        super()._apply(fn, recurse)
        self.reset_buffers(next(self.buffers()).device)
        return self
