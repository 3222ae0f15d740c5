"""Positions as biases of attention scores, a number for each head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pipeline.layers.table import Table


class PerHead(nn.Module):
    """A module whose output's dim 0 counts the attention heads, so that whoever splits the heads knows what to split."""


class AlibiSlopes(PerHead, Table):
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


class RelativeBias(nn.Module):
    """Learned biases of distances in buckets, as in T5 (Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 2.1).

    Half of the buckets are for one distance each, from 0 on; the others widen with the logarithm of the distance, and the last one also
    takes all from `max_distance` on. Without causality keys before and after a query have half of the buckets each.

    Args:
        heads: attention heads; a slice of the weight's rows is a correct bias of fewer heads.
        buckets: numbers a head.
        max_distance: tokens.
        causal: whether no key comes after its query.
    """

    def __init__(self, heads: int, buckets: int, max_distance: int, *, causal: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, buckets))
        self.max_distance, self.causal = max_distance, causal

    def forward(self, length: int) -> Tensor:
        """The biases of queries towards keys of one sequence of `length` tokens, (1, heads, length, length)."""
        offsets = torch.arange(1 - length, length, device=self.weight.device)
        # Query q sees the offsets from -q to length - 1 - q: a window of all of them, the last window for the first query.
        return self.weight[:, self.buckets(offsets)].unfold(1, length, 1).flip(1).unsqueeze(0)

    def buckets(self, offsets: Tensor) -> Tensor:
        """The bucket of each offset (a key's place less its query's), int64 of the same shape."""
        count = self.weight.shape[1]
        if self.causal:
            first, distance = torch.zeros_like(offsets), (-offsets).clamp(min=0)
        else:
            count //= 2
            first, distance = count * (offsets > 0), offsets.abs()
        exact = count // 2
        growth = (distance.clamp(min=1).float() / exact).log() / math.log(self.max_distance / exact)
        wide = (exact + (growth * (count - exact)).long()).clamp(max=count - 1)
        return first + torch.where(distance < exact, distance, wide)
