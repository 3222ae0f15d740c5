"""Quantization-aware training: linear layers compute with weights that are rounded as stage.quantize=int8 rounds them.

The gradient passes the rounding unchanged: straight-through estimator (Bengio et al. 2013, https://arxiv.org/abs/1308.3432).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.linear import Linear
from pipeline.layers.lora import linear_layers
from pipeline.layers.uniform_quantization import QuantizedMatrix, Scheme, round_to_codes, scale_of

#: 8 bits, symmetric, a scale for each output.
SCHEME = Scheme(8)


class FakeQuantizedLinear(Linear):
    """A linear layer that rounds its weight in each forward pass.

    Attributes:
        reduce_max: elementwise maximum over the ranks that hold slices of a row; None if rows are whole.
    """

    reduce_max: Callable[[Tensor], Tensor] | None = None

    def __init__(self, base: nn.Linear) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None)
        self.weight, self.bias = base.weight, base.bias

    def forward(self, x: Tensor) -> Tensor:
        """(..., input) -> (..., output)."""
        rounded: Tensor = _StraightThrough.apply(self.weight, self.rounded())
        return F.linear(x, rounded, self.bias)

    @torch.no_grad()
    def rounded(self) -> Tensor:
        """Return the rounded weight, in its dtype."""
        largest = self.weight.float().abs().amax(1, keepdim=True)
        if self.reduce_max is not None:
            largest = self.reduce_max(largest)
        scale = scale_of(largest, SCHEME.highest, torch.float32)
        zero_point = torch.zeros_like(scale, dtype=torch.int8)
        return QuantizedMatrix(round_to_codes(self.weight, scale, zero_point, SCHEME), scale, zero_point).dequantize().to(self.weight.dtype)


class _StraightThrough(torch.autograd.Function):
    """Returns the rounded weight, and its gradient as that of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rounded: Tensor) -> Tensor:  # noqa: ARG004
        return rounded.view_as(rounded)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradients[0], None


def fake_quantize_layers(model: nn.Module) -> None:
    """Replace the linear layers of a model's blocks by layers that round their weights."""
    for name, layer in linear_layers(model):
        if name.startswith("blocks."):
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, FakeQuantizedLinear(layer))
