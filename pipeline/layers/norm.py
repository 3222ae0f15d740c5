"""RMSNorm and LayerNorm with the weight stored as an offset from one."""

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
