"""Uniform quantization of weights (Jacob et al. 2018, https://arxiv.org/abs/1712.05877): integers with a scale and a zero point."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Scheme:
    """How a matrix is quantized.

    Attributes:
        bits: width of the signed integers, at most 8.
        symmetric: the zero point is 0 and the integers are those from -(2**(bits-1) - 1) on; otherwise affine, with all 2**bits integers.
        group: number of consecutive weights of a row that share a scale; None for all of a row (per channel).
        per_tensor: one scale for the full matrix, instead.
    """

    bits: int
    symmetric: bool = True
    group: int | None = None
    per_tensor: bool = False

    @property
    def lowest(self) -> int:
        """The smallest integer."""
        return -(2 ** (self.bits - 1)) + (1 if self.symmetric else 0)

    @property
    def highest(self) -> int:
        """The largest integer."""
        return 2 ** (self.bits - 1) - 1


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized matrix: weight = (codes - zero_point) * scale.

    Attributes:
        codes: int8 (output, input).
        scale: (output, groups of a row), or (1, 1) per tensor.
        zero_point: int8, of the shape of the scale.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor

    def dequantize(self) -> Tensor:
        """Return the weights that the integers stand for, fp32 (output, input)."""
        groups = self.scale.shape[1]
        codes = self.codes.float().unflatten(1, (groups, -1))
        return ((codes - self.zero_point.float()[..., None]) * self.scale.float()[..., None]).flatten(1)


def range_parameters(weight: Tensor, scheme: Scheme, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return scale (in `dtype`) and zero point (int8) such that the smallest and the largest weight of each group are in range.

    Args:
        weight: (output, input); the input is a multiple of the group size.
        scheme: how the matrix is quantized.
        dtype: dtype in which scales are stored; weights are rounded with the stored scale.

    Returns:
        Both (output, groups of a row), or (1, 1) per tensor. Zero is in the range and has an integer of its own.
    """
    weight = weight.float()
    grouped = weight.reshape(1, 1, -1) if scheme.per_tensor else weight.unflatten(1, (-1, scheme.group or weight.shape[1]))
    low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
    if scheme.symmetric:
        scale = scale_of(torch.maximum(-low, high), scheme.highest, dtype)
        return scale, torch.zeros_like(scale, dtype=torch.int8)
    scale = scale_of(high - low, scheme.highest - scheme.lowest, dtype)
    zero_point = torch.round(scheme.lowest - low / scale.float()).clamp(scheme.lowest, scheme.highest)
    return scale, zero_point.to(torch.int8)


def scale_of(span: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return the scale that divides a span into steps; 1 for a span of 0, a group of zeros."""
    scale = (span / steps).to(dtype)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def round_to_codes(weight: Tensor, scale: Tensor, zero_point: Tensor, scheme: Scheme) -> Tensor:
    """Return the nearest integers, int8 (output, input); scale and zero point are those of range_parameters."""
    grouped = weight.float().unflatten(1, (scale.shape[1], -1))
    codes = torch.round(grouped / scale.float()[..., None]) + zero_point.float()[..., None]
    return codes.clamp(scheme.lowest, scheme.highest).flatten(1).to(torch.int8)


def quantize(weight: Tensor, scheme: Scheme, dtype: torch.dtype = torch.float32) -> QuantizedMatrix:
    """Quantize a matrix by rounding to the nearest integer; arguments as in range_parameters."""
    scale, zero_point = range_parameters(weight, scheme, dtype)
    return QuantizedMatrix(round_to_codes(weight, scale, zero_point, scheme), scale, zero_point)
