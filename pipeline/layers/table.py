"""Tables that are neither learned nor stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn


class Table(nn.Module):
    """A module with fp32 tables that are computed, on the CPU so that they are the same on every kind of device."""

    def reset_buffers(self, device: torch.device) -> None:
        """Compute the tables and put them on a device."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Follow the model to its device (`to`, `to_empty`), but not to its dtype (`bfloat16`)."""
        super()._apply(fn, recurse)
        self.reset_buffers(next(self.buffers()).device)
        return self
