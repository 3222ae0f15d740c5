"""Feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.linear import Linear

#: gelu_tanh is the tanh approximation that GPT-2 was trained with (Hendrycks & Gimpel 2016), gelu the exact function.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


class MLP(nn.Module):
    """Feed-forward layer: down(activation(up(x)))."""

    def __init__(self, hidden: int, ffn_hidden: int, *, bias: bool, activation: str = "gelu_tanh") -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.up = Linear(hidden, ffn_hidden, bias=bias)
        self.down = Linear(ffn_hidden, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> (batch, sequence, hidden)."""
        return self.down(self.activation(self.up(x)))


class GatedMLP(nn.Module):
    """Gated feed-forward layer: down(activation(gate(x)) * up(x)).

    SwiGLU with silu, GEGLU with gelu (Shazeer 2020, https://arxiv.org/abs/2002.05202).
    """

    def __init__(self, hidden: int, ffn_hidden: int, *, bias: bool, activation: str = "silu") -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate = Linear(hidden, ffn_hidden, bias=bias)
        self.up = Linear(hidden, ffn_hidden, bias=bias)
        self.down = Linear(ffn_hidden, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> (batch, sequence, hidden)."""
        return self.down(self.activation(self.gate(x)) * self.up(x))
