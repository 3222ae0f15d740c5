"""RMSNorm and LayerNorm with the weight stored as an offset from one, and RMSNorm of the parts of a width."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm that multiplies by 1 + weight (Gemma, https://arxiv.org/abs/2403.08295); the initial weight is zero.

    The whole norm is computed in fp32 and rounded once: in bf16 the sum 1 + weight would lose the low bits of the weight.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        assert self.weight is not None
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), self.normalized_shape, 1.0 + self.weight.to(wide), self.eps).to(x.dtype)


class OffsetLayerNorm(nn.LayerNorm):
    """LayerNorm that multiplies by 1 + weight (LayerNorm1P of Megatron-LM and Nemotron-4); the initial weight is zero.

    It is computed as OffsetRMSNorm is.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., hidden)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.layer_norm(x.to(wide), self.normalized_shape, 1.0 + self.weight.to(wide), self.bias.to(wide), self.eps).to(x.dtype)


class GroupRMSNorm(nn.Module):
    """RMSNorm of each of several equal parts of a width; a slice of whole parts is a correct norm.

    Args:
        width: of all parts.
        groups: number of parts.
        eps: added to the mean square.
    """

    def __init__(self, width: int, groups: int, *, eps: float) -> None:
        super().__init__()
        self.part, self.eps = width // groups, eps
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) -> (..., width)."""
        return F.rms_norm(x.unflatten(-1, (-1, self.part)), (self.part,), eps=self.eps).flatten(-2) * self.weight
