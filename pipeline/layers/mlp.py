"""Feed-forward layers and their activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.linear import Linear, Projection, project
from pipeline.layers.recipes import Constant


def _squared_relu(x: Tensor) -> Tensor:
    """max(0, x)^2 of every element."""
    return F.relu(x).square()


#: gelu_tanh is the tanh approximation that GPT-2 was trained with (Hendrycks & Gimpel 2016), gelu the exact function; relu2 is the square
#: of relu (So et al. 2021, https://arxiv.org/abs/2109.08668).
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "relu2": _squared_relu,
    "silu": F.silu,
}


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gate sigmoid(alpha gate) (up + 1) with gate at most `limit`, and up within [-limit, limit] (gpt-oss)."""

    limit: float
    alpha: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Apply to the outputs of both projections, of the same shape."""
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up.clamp(-self.limit, self.limit) + 1)


@dataclass(frozen=True)
class Gated:
    """activation(gate) * up."""

    activation: Callable[[Tensor], Tensor]

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Apply to the outputs of both projections, of the same shape."""
        return self.activation(gate) * up


class XIELU(nn.Module):
    """xIELU (Huang & Schlag 2024, https://arxiv.org/abs/2411.13010): quadratic for x > 0, with trained curvatures on both sides.

    a_p x^2 + BETA x for x > 0, else a_n (e^x - 1 - x) + BETA x, with a_p = softplus(alpha_p) and a_n = BETA + softplus(alpha_n).
    """

    BETA = 0.5
    #: Upper bound of x in the exponential, as in the authors' code.
    EPS = -1e-6
    #: Both curvatures are 0.8 at first.
    INITIAL: ClassVar[dict[str, Constant]] = {
        "alpha_p": Constant(math.log(math.expm1(0.8))),
        "alpha_n": Constant(math.log(math.expm1(0.8 - BETA))),
    }

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        """Apply to every element; any shape."""
        positive = F.softplus(self.alpha_p) * x * x
        negative = (self.BETA + F.softplus(self.alpha_n)) * (torch.expm1(x.clamp(max=self.EPS)) - x)
        return torch.where(x > 0, positive, negative) + self.BETA * x


class MLP(nn.Module):
    """Feed-forward layer: down(activation(up(x))). The activation is a key of ACTIVATIONS, or a module with parameters."""

    def __init__(self, hidden: int, ffn_hidden: int, *, bias: bool, activation: str | nn.Module = "gelu_tanh") -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation] if isinstance(activation, str) else activation
        self.project: Projection = project
        self.up = Linear(hidden, ffn_hidden, bias=bias)
        self.down = Linear(ffn_hidden, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> (batch, sequence, hidden)."""
        (inner,) = self.project(x, self.up)
        return self.down(self.activation(inner))


class GatedMLP(nn.Module):
    """Gated feed-forward layer: down(activation(gate(x)) * up(x)).

    SwiGLU with silu, GEGLU with gelu (Shazeer 2020, https://arxiv.org/abs/2002.05202).
    """

    def __init__(self, hidden: int, ffn_hidden: int, *, bias: bool, activation: str = "silu") -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.project: Projection = project
        self.gate = Linear(hidden, ffn_hidden, bias=bias)
        self.up = Linear(hidden, ffn_hidden, bias=bias)
        self.down = Linear(ffn_hidden, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> (batch, sequence, hidden)."""
        gate, up = self.project(x, self.gate, self.up)
        return self.down(self.activation(gate) * up)


class OutputGate(nn.Module):
    """The gate of a layer's output, one number for each token: sigmoid(weight x). Like a router, it is not a linear layer of the model."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden) -> (..., 1)."""
        return F.linear(x, self.weight).sigmoid()
