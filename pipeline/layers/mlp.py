"""Feed-forward layers."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.linear import Linear


class MLP(nn.Module):
    """down(gelu(up(x))), with the tanh form of GELU that GPT-2 was trained with (Hendrycks & Gimpel 2016)."""

    def __init__(self, hidden: int, ffn_hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.up = Linear(hidden, ffn_hidden, bias=bias)
        self.down = Linear(ffn_hidden, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> (batch, sequence, hidden)."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class GatedMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, hidden: int, ffn_hidden: int, *, bias: bool) -> None:
        super().__init__()
        self.gate = Linear(hidden, ffn_hidden, bias=bias)
        self.up = Linear(hidden, ffn_hidden, bias=bias)
        self.down = Linear(ffn_hidden, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> (batch, sequence, hidden)."""
        return self.down(F.silu(self.gate(x)) * self.up(x))
