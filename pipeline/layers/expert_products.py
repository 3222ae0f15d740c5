"""Matrix products of all experts of a MoE layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.layers.row_counts import counts_on_host
from pipeline.layers.uncompiled import uncompiled


def has_grouped_kernel(x: Tensor) -> bool:
    """Whether products are those of the grouped kernel of GPUs, which the planner traces."""
    return x.dtype == torch.bfloat16 and (x.is_cuda or x.is_meta)


@uncompiled  # the number of rows of each expert changes with every micro-batch
def loop_mm(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Compute x @ weights[e].T for the rows of each expert in a loop; an expert without rows gets a zero gradient.

    Args:
        x: (rows, input), sorted by expert.
        weights: (experts, output, input).
        counts: int64 (experts,), number of rows of each; reading them synchronizes with the device.

    Returns:
        (rows, output).
    """
    sizes = counts_on_host(counts, len(x))
    parts = x.split([*sizes, x.shape[0] - sum(sizes)])
    products = [F.linear(part, weight) for part, weight in zip(parts, weights.unbind(), strict=False)]
    return torch.cat([*products, x.new_zeros(parts[-1].shape[0], weights.shape[1])])


def grouped_mm(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Compute `loop_mm` in one kernel that reads the counts on the device; rows of no expert are undefined."""
    return F.grouped_mm(x, weights.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))


def batched_mm(x: Tensor, weights: Tensor) -> Tensor:
    """Compute x[e] @ weights[e].T: (experts, rows, input) and (experts, output, input) -> (experts, rows, output).

    On GPUs by the grouped kernel, whose result selective activation checkpointing keeps; it does not keep that of `bmm`, the operator of
    attention scores.
    """
    return F.grouped_mm(x, weights.transpose(1, 2)) if has_grouped_kernel(x) else torch.bmm(x, weights.transpose(1, 2))


def rows_of(biases: Tensor, counts: Tensor, rows: int) -> Tensor:
    """Return the bias of the expert of each row.

    Args:
        biases: (experts, output).
        counts: int64 (experts,), number of rows of each; the rows are sorted by expert.
        rows: their number, with rows of no expert at the end: zeros, whose gradients, which may be NaN, are left out.

    Returns:
        (rows, output).
    """
    expert = torch.bucketize(torch.arange(rows, device=counts.device), counts.cumsum(0), right=True)
    # The gradient of a lookup is summed in fp32 on GPUs, and in the same order every time.
    return F.embedding(expert, F.pad(biases, (0, 0, 0, 1)))


def sorted_mm(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """`grouped_mm` where there is a kernel, else `loop_mm`."""
    return (grouped_mm if has_grouped_kernel(x) else loop_mm)(x, weights, counts)


@dataclass(frozen=True)
class Products:
    """How experts multiply.

    Attributes:
        batched: (experts, rows, input) and (experts, output, input) -> (experts, rows, output), as batched_mm.
        grouped: of any number of rows of each expert, as grouped_mm.
    """

    batched: Callable[[Tensor, Tensor], Tensor]
    grouped: Callable[[Tensor, Tensor, Tensor], Tensor]


#: Products in the dtype of the weights.
PRODUCTS = Products(batched_mm, sorted_mm)
