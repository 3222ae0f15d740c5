"""Positions as biases of attention scores, a number for each head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pipeline.layers.table import Table


class PerHead(nn.Module):
    """A module whose output's dim 0 counts the attention heads, so that whoever splits the heads knows what to split."""


class Slopes(PerHead, Table):
    """The slopes of ALiBi (Press et al. 2022, https://arxiv.org/abs/2108.12409): 2^(-8/n), 2^(-16/n), ... for n heads.

    Where n is no power of two, those of the next lower one, and every other one of the next higher.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.values: Tensor
        self.register_buffer("values", torch.empty(heads, dtype=torch.float32), persistent=False)
        self.reset_buffers(self.values.device)

    def reset_buffers(self, device: torch.device) -> None:
        """See Table."""
        heads = len(self.values)
        power = 1 << int(math.log2(heads))
        found = [2 ** (-8 * (i + 1) / power) for i in range(power)]
        found += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
        self.values = torch.tensor(found, dtype=torch.float32, device="cpu").to(device)

    def forward(self) -> Tensor:
        """(heads,), fp32."""
        return self.values
