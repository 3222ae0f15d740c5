"""NF4 (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314): frozen weights in 4 bits, whose scales are in 8 bits (double quantization).

A block is 64 consecutive inputs of an output, with a scale of its own. The scales of 64 consecutive outputs share an fp32 factor. The
paper has 256 scales for each factor; with tiles of 64 x 64, a slice of a weight at multiples of 64 has the codes and the scales of the
full weight, so that tensor parallelism does not change the result. 4.13 bits per weight.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Quantiles of a normal distribution, scaled to [-1, 1], with an exact 0 (appendix E of the paper).
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334),
    *(-0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
#: Weights of a block, and blocks that share a factor.
BLOCK = 64


class NF4Weight(nn.Module):
    """A frozen matrix in NF4. Called with x, it returns x @ weight.T; the backward pass computes the weight again.

    Args:
        weight: (output, input); its dtype is that of the dequantized weight.

    Attributes:
        codes: uint8 (output, input / 2), two codes each; the input is padded to full blocks.
        scales: uint8 (output, blocks).
        factors: fp32 (outputs / 64, blocks).
    """

    codes: Tensor
    scales: Tensor
    factors: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.shape, self.dtype = tuple(weight.shape), weight.dtype
        for name, value in zip(("codes", "scales", "factors"), quantize(weight), strict=True):
            self.register_buffer(name, value, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., input) -> (..., output)."""
        result: Tensor = _Product.apply(x, self.codes, self.scales, self.factors, self.shape[1])
        return result

    def dequantize(self) -> Tensor:
        """Return the weight, (output, input)."""
        return dequantize(self.codes, self.scales, self.factors, self.shape[1], self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(buffer.nbytes for buffer in (self.codes, self.scales, self.factors))

    # What follows is the part of a tensor's interface that checkpoints use.

    def numel(self) -> int:
        """Number of weights."""
        return self.shape[0] * self.shape[1]

    def detach(self) -> Tensor:
        """Return the weight as a flat tensor."""
        return self.dequantize().flatten()

    @torch.no_grad()
    def copy_(self, values: Tensor) -> None:
        """Quantize other values, a flat tensor."""
        weight = values.to(self.codes.device, self.dtype).view(self.shape)
        for buffer, value in zip((self.codes, self.scales, self.factors), quantize(weight), strict=True):
            buffer.copy_(value)


def stored_bytes(outputs: int, inputs: int) -> int:
    """Return NF4Weight.nbytes of a matrix of this shape."""
    blocks = -(-inputs // BLOCK)
    return outputs * blocks * (BLOCK // 2 + 1) + -(-outputs // BLOCK) * blocks * 4


class _Product(torch.autograd.Function):
    """x @ weight.T. Autograd would save the dequantized weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, factors: Tensor, inputs: int) -> Tensor:
        ctx.save_for_backward(codes, scales, factors)
        ctx.inputs = inputs
        return F.linear(x, dequantize(codes, scales, factors, inputs, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,), (codes, scales, factors) = gradients, ctx.saved_tensors
        return gradient @ dequantize(codes, scales, factors, ctx.inputs, gradient.dtype), None, None, None, None


def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a matrix.

    Args:
        weight: (output, input).

    Returns:
        codes, scales and factors, as the attributes of NF4Weight. Weights are rounded with the scales after their own quantization.
    """
    outputs, inputs = weight.shape
    blocks = F.pad(weight.float(), (0, -inputs % BLOCK)).unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(2)
    factors = F.pad(largest, (0, 0, 0, -outputs % BLOCK)).unflatten(0, (-1, BLOCK)).amax(1) / 255
    step = factors.repeat_interleave(BLOCK, dim=0)[:outputs]
    scales = torch.round(largest / step.clamp(min=torch.finfo(torch.float32).tiny)).to(torch.uint8)
    normalized = blocks / (scales.float() * step).clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    levels = torch.tensor(LEVELS, device=weight.device)
    nearest = torch.bucketize(normalized, (levels[1:] + levels[:-1]) / 2).to(torch.uint8).flatten(1)
    return nearest[:, 0::2] << 4 | nearest[:, 1::2], scales, factors


def dequantize(codes: Tensor, scales: Tensor, factors: Tensor, inputs: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix, (output, input); arguments as the attributes of NF4Weight."""
    pairs = F.embedding(codes.int(), _level_pairs(codes.device)).flatten(1)  # one lookup for two weights
    scale = scales * factors.repeat_interleave(BLOCK, dim=0)[: len(codes)]
    return pairs.unflatten(1, (-1, BLOCK)).mul_(scale[..., None]).flatten(1)[:, :inputs].to(dtype)


@cache
def _level_pairs(device: torch.device) -> Tensor:
    """The levels of the two codes of each byte, fp32 (256, 2). Cached: a copy to a GPU in each product would wait for the host."""
    levels = torch.tensor(LEVELS, device=device)
    return torch.stack([levels.repeat_interleave(len(LEVELS)), levels.repeat(len(LEVELS))], dim=1)
