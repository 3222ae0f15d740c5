"""fp8 matrix products of all experts of a MoE layer: E4M3 operands with a scale for each row, and a bf16 result.

The recipe is `rowwise` of torchao's float8 training (https://github.com/pytorch/ao/tree/main/torchao/float8), also in the backward pass: a
row along the summed dim is scaled by a power of two, and every operand is rounded again for the dim that its product sums. The same
kernel and scales as in torchao's prototype for MoE layers, which does not support experts with any number of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.layers.expert_products import Products, loop_mm
from pipeline.layers.token_permutation import select_rows
from pipeline.layers.uncompiled import uncompiled

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
#: Lower bound of the maximum of a row, as in torchao: a row of zeros has a finite scale.
TINY = 1e-12
#: The kernel reads rows of a multiple of this many bytes, also of each expert where it sums over the expert's rows.
ALIGNMENT = 16
_EXPONENT = 0x7F800000


class Fp8Matrix(NamedTuple):
    """A matrix, or one for each expert, in 8 bits.

    Attributes:
        values: E4M3 (..., rows, summed), contiguous.
        factors: fp32 (..., rows), by which the values are multiplied; (experts, rows) if each expert sums its own part of the columns.
    """

    values: Tensor
    factors: Tensor


def quantize(x: Tensor) -> Fp8Matrix:
    """Round (..., rows, summed) to 8 bits with a scale for each row."""
    scales = _scales(x.abs().amax(dim=-1))
    # A power of two: the product is exact in bf16.
    return Fp8Matrix((x * scales.to(x.dtype).unsqueeze(-1)).to(E4M3).contiguous(), scales.reciprocal())


def _scales(largest: Tensor) -> Tensor:
    """The largest powers of two, fp32, that leave the maxima of the rows in the range of E4M3."""
    ratio = LARGEST / largest.float().clamp(min=TINY)
    return (ratio.view(torch.int32) & _EXPONENT).view(torch.float32)


class _AlignedRows:
    """Rows sorted by expert, copied so that every expert has a positive multiple of ALIGNMENT rows; added rows are zeros.

    All sizes are known without the counts.

    Args:
        counts: int64 (experts,), number of rows of each.
        rows: their sum, and rows of no expert at the end, which are left out.

    Attributes:
        sizes: int64 (experts,), number of rows of each after the copy.
    """

    def __init__(self, counts: Tensor, rows: int) -> None:
        self._experts = len(counts)
        self.sizes = ((counts + ALIGNMENT - 1) // ALIGNMENT).clamp(min=1) * ALIGNMENT  # the kernel requires rows of every expert
        total = (-(-rows // ALIGNMENT) + self._experts) * ALIGNMENT
        row = torch.arange(total, device=counts.device)
        expert = torch.bucketize(row, self.sizes.cumsum(0), right=True)
        known = expert.clamp(max=self._experts - 1)
        position = row - (self.sizes.cumsum(0) - self.sizes)[known]
        filled = (expert < self._experts) & (position < counts[known])
        self._source = ((counts.cumsum(0) - counts)[known] + position).where(filled, rows)
        self._expert_of_block = expert[::ALIGNMENT]

    def quantize_columns(self, x: Tensor) -> Fp8Matrix:
        """Round (rows, columns) to 8 bits, transposed: each column with a scale for each expert."""
        blocks = select_rows(x, self._source, partial=True).unflatten(0, (-1, ALIGNMENT))
        index = self._expert_of_block.unsqueeze(1).expand(-1, x.shape[1])
        largest = x.new_zeros(self._experts + 1, x.shape[1]).scatter_reduce(0, index, blocks.abs().amax(dim=1), "amax")
        scales = _scales(largest)
        values = (blocks * scales.to(x.dtype)[self._expert_of_block].unsqueeze(1)).to(E4M3)
        return Fp8Matrix(values.flatten(0, 1).t().contiguous(), scales[:-1].reciprocal())


def _on_gpu(x: Tensor) -> bool:
    """Whether products are those of the kernel, which the planner traces; else they are emulated."""
    return x.is_cuda or x.is_meta


def _multiply(a: Fp8Matrix, b: Fp8Matrix, counts: Tensor | None = None, *, fast: bool = False) -> Tensor:
    """Multiply (..., m, summed) by the transpose of (..., n, summed).

    Args:
        a, b: (experts, rows, columns); without the dim of experts, the rows of a are sorted by expert, or the columns of both.
        counts: int64 (experts,), number of rows or columns of each in what is sorted.
        fast: sum in the registers of the tensor cores, with fewer bits than fp32, as torchao does in forward passes.

    Returns:
        bf16 (m, n) with rows sorted by expert, or (experts, m, n).
    """
    if not _on_gpu(a.values):
        return _emulated(a, b, counts).to(torch.bfloat16)
    ends = None if counts is None else counts.cumsum(0, dtype=torch.int32)
    left, right = (x.factors.flatten() if x.values.dim() == 2 else x.factors for x in (a, b))
    return torch._scaled_grouped_mm(
        a.values, b.values.transpose(-2, -1), left, right, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _emulated(a: Fp8Matrix, b: Fp8Matrix, counts: Tensor | None) -> Tensor:
    """`_multiply` by fp32 products of the rounded numbers."""
    left, right = a.values.float(), b.values.float()
    if counts is not None and b.values.dim() == 2:
        sizes = counts.tolist()
        assert all(size > 0 and size % ALIGNMENT == 0 for size in sizes), "the kernel does not sum over other numbers of rows"
        parts = zip(left.split([*sizes, left.shape[1] - sum(sizes)], 1), right.split([*sizes, right.shape[1] - sum(sizes)], 1), strict=True)
        factors = zip(a.factors.unsqueeze(2), b.factors.unsqueeze(2), strict=True)
        return torch.stack([(x * f) @ (y * g).T for (x, y), (f, g) in zip(parts, factors, strict=False)])
    left, right = left * a.factors.unsqueeze(-1), right * b.factors.unsqueeze(-1)
    return torch.bmm(left, right.transpose(1, 2)) if counts is None else loop_mm(left, right, counts)


class _BatchedProduct(torch.autograd.Function):
    """x[e] @ weights[e].T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        return _multiply(quantize(x), quantize(weights), fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weights = ctx.saved_tensors
        grad_x = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_x = _multiply(quantize(grad), quantize(weights.transpose(1, 2)))
        if ctx.needs_input_grad[1]:
            missing = -x.shape[1] % ALIGNMENT
            left, right = (F.pad(operand, (0, 0, 0, missing)) if missing else operand for operand in (grad, x))
            grad_weights = _multiply(quantize(left.transpose(1, 2)), quantize(right.transpose(1, 2)))
        return grad_x, grad_weights


class _GroupedProduct(torch.autograd.Function):
    """x @ weights[e].T for the rows of each expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, counts)
        return _multiply(quantize(x), quantize(weights), counts, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weights, counts = ctx.saved_tensors
        grad_x = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_x = _multiply(quantize(grad), quantize(weights.transpose(1, 2)), counts)
        if ctx.needs_input_grad[1]:
            aligned = _AlignedRows(counts, len(x))
            grad_weights = _multiply(aligned.quantize_columns(grad), aligned.quantize_columns(x), aligned.sizes)
        return grad_x, grad_weights, None


def batched_mm(x: Tensor, weights: Tensor) -> Tensor:
    """As expert_products.batched_mm, in 8 bits."""
    product: Tensor = _BatchedProduct.apply(x, weights)
    return product


def grouped_mm(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """As expert_products.grouped_mm, in 8 bits."""
    product: Tensor = (_GroupedProduct.apply if _on_gpu(x) else _emulated_grouped_mm)(x, weights, counts)
    return product


@uncompiled  # the host reads the numbers of rows
def _emulated_grouped_mm(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    product: Tensor = _GroupedProduct.apply(x, weights, counts)
    return product


FP8_PRODUCTS = Products(batched_mm, grouped_mm)
