"""Position encodings as biases of the attention scores, per head: ALiBi slopes and the relative position biases of T5."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pipeline.layers.computed_buffers import ComputedBuffers


class PerHead(nn.Module):
    """A module whose output has the attention heads in dim 0, which tensor parallelism shards."""


class AlibiSlopes(PerHead, ComputedBuffers):
    """The slopes of ALiBi (Press et al. 2022, https://arxiv.org/abs/2108.12409): 2^(-8/n), 2^(-16/n), ... for n heads.

    If n is not a power of two: the slopes of the next lower power of two, then every other slope of the next higher one.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.values: Tensor
        self.register_buffer("values", torch.empty(heads, dtype=torch.float32), persistent=False)
        self.reset_buffers(self.values.device)

    def compute_buffers(self, device: torch.device) -> None:
        """See ComputedBuffers."""
        heads = len(self.values)
        power = 1 << int(math.log2(heads))
        slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
        slopes += [2 ** (-4 * (2 * i + 1) / power) for i in range(heads - power)]
        self.values = torch.tensor(slopes, dtype=torch.float32, device="cpu").to(device)

    def forward(self) -> Tensor:
        """Return the slopes, fp32 (heads,)."""
        return self.values


class RelativeBias(nn.Module):
    """Learned relative position biases, bucketed, as in T5 (Raffel et al. 2020, https://arxiv.org/abs/1910.10683, section 2.1).

    Half of the buckets hold one distance each, starting at 0; the others grow logarithmically with the distance, and the last one also
    holds all distances from `max_distance` on. Without causality, keys before and after a query have half of the buckets each.

    Args:
        heads: attention heads; a slice of the weight's rows is the bias of fewer heads.
        buckets: number of buckets.
        max_distance: distance from which all keys share the last bucket, in tokens.
        causal: whether keys never come after their query (decoder).
    """

    def __init__(self, heads: int, buckets: int, max_distance: int, *, causal: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, buckets))
        self.max_distance, self.causal = max_distance, causal

    def forward(self, length: int) -> Tensor:
        """Return the biases of a sequence of `length` tokens, (1, heads, queries, keys)."""
        offsets = torch.arange(1 - length, length, device=self.weight.device)
        # Query q has the offsets -q to length - 1 - q: a sliding window over all offsets, the last window for the first query.
        return self.weight[:, self.buckets(offsets)].unfold(1, length, 1).flip(1).unsqueeze(0)

    def between(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the biases between positions: int64 (batch, queries), (batch or 1, keys) -> (batch, heads, queries, keys)."""
        return self.weight[:, self.buckets(keys[:, None, :] - queries[:, :, None])].transpose(0, 1)

    def buckets(self, offsets: Tensor) -> Tensor:
        """Return the bucket of each offset (position of the key minus position of the query), int64 of the same shape."""
        count = self.weight.shape[1]
        if self.causal:
            first, distance = torch.zeros_like(offsets), (-offsets).clamp(min=0)
        else:
            count //= 2
            first, distance = count * (offsets > 0), offsets.abs()
        exact = count // 2
        log_ratio = (distance.clamp(min=1).float() / exact).log() / math.log(self.max_distance / exact)
        logarithmic = (exact + (log_ratio * (count - exact)).long()).clamp(max=count - 1)
        return first + torch.where(distance < exact, distance, logarithmic)
