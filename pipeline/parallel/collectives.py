"""Differentiable collectives: the conjugate pairs f, g of Shoeybi et al. 2019 and the sequence-parallel pairs of Korthikanti et al. 2022.

| forward | backward |
|---|---|
| copy: identity | all-reduce |
| reduce: all-reduce | identity |
| gather_sequence: all-gather | reduce-scatter |
| reduce_scatter_sequence: reduce-scatter | all-gather |
| scatter_heads: local slice of the heads | all-gather |
| gather_columns: all-gather | reduce-scatter |
| reduce_scatter_columns: reduce-scatter | all-gather |
| replicate_columns: all-gather | local slice of the columns |
| all_reduce_with_grad: all-reduce | all-reduce |
| scale_gradient: identity | division by the group size |
| scatter_heads_gather_sequence: all-to-all | scatter_sequence_gather_heads |
| scatter_sequence_gather_heads: all-to-all | scatter_heads_gather_sequence |
| scatter_sequence_gather_columns: all-to-all | its inverse |

Activations are (batch, sequence, hidden); the sequence collectives shard dim 1. No collective works in place, since autograd may share
the same buffer with other consumers. The sequence collectives are written as split and cat, the form in which inductor recognizes them
and fuses them with matrix products (parallel.async_tensor).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

#: The functional collectives: operators that torch.compile traces, and whose results selective activation checkpointing can save.
_OPS = torch.ops._c10d_functional


def all_reduce(tensor: Tensor, group: ProcessGroup, op: str = "sum") -> Tensor:
    """Return the reduction (sum or max) over the group as a new tensor."""
    if group.size() == 1:
        return tensor
    return _result(_OPS.all_reduce(tensor.contiguous(), op, group.group_name))


def all_gather(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks in rank order; all have the same shape. Not differentiable."""
    return list(_all_gather_heads(tensor, group).chunk(group.size()))


def _result(pending: Tensor) -> Tensor:
    """Wait for a functional collective: later operations on the device see its result."""
    waited: Tensor = _OPS.wait_tensor(pending)
    return waited


def _all_gather_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(batch, sequence / ranks, hidden) on each rank -> (batch, sequence, hidden)."""
    gathered = _all_gather_heads(tensor, group)
    return torch.cat(torch.split(gathered, tensor.shape[0]), dim=1)


def _reduce_scatter_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(batch, sequence, hidden), summed over the ranks -> the local (batch, sequence / ranks, hidden)."""
    chunks = torch.cat(torch.split(tensor, tensor.shape[1] // group.size(), dim=1))
    return _result(_OPS.reduce_scatter_tensor(chunks, "sum", group.size(), group.group_name))


def _local_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(heads, ...) -> the local (heads / ranks, ...)."""
    return tensor.chunk(group.size())[group.rank()].contiguous()


def _all_gather_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(heads / ranks, ...) on each rank -> (heads, ...)."""
    return _result(_OPS.all_gather_into_tensor(tensor.contiguous(), group.size(), group.group_name))


def _scatter_heads_gather_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(batch, heads, tokens / ranks, head_dim) -> (batch, heads / ranks, tokens, head_dim)."""
    sent = tensor.unflatten(1, (group.size(), -1)).permute(1, 0, 2, 3, 4).contiguous()
    return _all_to_all(sent, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _scatter_sequence_gather_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(batch, heads / ranks, tokens, head_dim) -> (batch, heads, tokens / ranks, head_dim)."""
    sent = tensor.unflatten(2, (group.size(), -1)).permute(2, 0, 1, 3, 4).contiguous()
    return _all_to_all(sent, group).transpose(0, 1).flatten(1, 2)


def _scatter_sequence_gather_columns(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(batch, sequence, hidden / ranks) -> (batch, sequence / ranks, hidden)."""
    sent = tensor.unflatten(1, (group.size(), -1)).permute(1, 0, 2, 3).contiguous()
    return _all_to_all(sent, group).permute(1, 2, 0, 3).flatten(2)


def _scatter_columns_gather_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(batch, sequence / ranks, hidden) -> (batch, sequence, hidden / ranks)."""
    sent = tensor.unflatten(2, (group.size(), -1)).permute(2, 0, 1, 3).contiguous()
    return _all_to_all(sent, group).transpose(0, 1).flatten(1, 2)


def _all_gather_columns(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(..., hidden / ranks) on each rank -> (..., hidden)."""
    pieces = _all_gather_heads(tensor.unsqueeze(0), group)
    return pieces.movedim(0, -2).flatten(-2)


def _reduce_scatter_columns(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(..., hidden), summed over the ranks -> the local (..., hidden / ranks)."""
    pieces = tensor.unflatten(-1, (group.size(), -1)).movedim(-2, 0).contiguous()
    return _result(_OPS.reduce_scatter_tensor(pieces, "sum", group.size(), group.group_name)).squeeze(0)


def _local_columns(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(..., hidden) -> the local (..., hidden / ranks)."""
    return tensor.chunk(group.size(), dim=-1)[group.rank()].contiguous()


def _all_to_all(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Send row i of dim 0 to rank i; row i of the result is received from rank i."""
    rows = [1] * group.size()
    return _result(_OPS.all_to_all_single(tensor, rows, rows, group.group_name))


Collective = Callable[[Tensor, ProcessGroup], Tensor]


def _identity(tensor: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ARG001 - a Collective
    """The tensor unchanged, as a view that autograd can track."""
    return tensor.view_as(tensor)


class _ConjugatePair(torch.autograd.Function):
    """One collective in the forward pass, its transpose in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, forward_op: Collective, backward_op: Collective) -> Tensor:
        ctx.group, ctx.backward_op = group, backward_op
        return forward_op(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_op(grad, ctx.group), None, None, None


def _conjugate_pair(tensor: Tensor, group: ProcessGroup, forward_op: Collective, backward_op: Collective) -> Tensor:
    result: Tensor = _ConjugatePair.apply(tensor, group, forward_op, backward_op)
    return result


def copy(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Enter a tensor-parallel region, in which each rank holds a piece of the weights."""
    return _conjugate_pair(tensor, group, _identity, all_reduce)


def reduce(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Leave a tensor-parallel region: sum the partial results of the ranks."""
    return _conjugate_pair(tensor, group, all_reduce, _identity)


def gather_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Enter a tensor-parallel region from activations that are sharded along the sequence."""
    return _conjugate_pair(tensor, group, _all_gather_sequence, _reduce_scatter_sequence)


def reduce_scatter_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Leave a tensor-parallel region to activations that are sharded along the sequence."""
    return _conjugate_pair(tensor, group, _reduce_scatter_sequence, _all_gather_sequence)


def scale_gradient(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Leave a region in which all ranks compute the same: each rank contributes 1 / ranks of the gradient."""
    return _conjugate_pair(tensor, group, _identity, lambda grad, group: grad / group.size())


def scatter_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Shard a replicated (heads, ...) tensor along the attention heads."""
    return _conjugate_pair(tensor, group, _local_heads, _all_gather_heads)


def all_reduce_with_grad(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over ranks that each compute their own result from the sum, so that the gradients of the ranks are summed too."""
    return _conjugate_pair(tensor, group, all_reduce, all_reduce)


def scatter_heads_gather_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all from some tokens of all heads to all tokens of some heads.

    (batch, heads, tokens / ranks, head_dim) -> (batch, heads / ranks, tokens, head_dim).
    """
    return _conjugate_pair(tensor, group, _scatter_heads_gather_sequence, _scatter_sequence_gather_heads)


def scatter_sequence_gather_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """The inverse, and also the transpose, of scatter_heads_gather_sequence."""
    return _conjugate_pair(tensor, group, _scatter_sequence_gather_heads, _scatter_heads_gather_sequence)


def gather_columns(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Enter a tensor-parallel region from rows whose columns are sharded: (rows, hidden / ranks) -> (rows, hidden)."""
    return _conjugate_pair(tensor, group, _all_gather_columns, _reduce_scatter_columns)


def reduce_scatter_columns(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Leave a tensor-parallel region to rows whose columns are sharded: (rows, hidden), partial sums -> (rows, hidden / ranks)."""
    return _conjugate_pair(tensor, group, _reduce_scatter_columns, _all_gather_columns)


def replicate_columns(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(batch, sequence, hidden / ranks) -> the same (batch, sequence, hidden) on every rank."""
    return _conjugate_pair(tensor, group, _all_gather_columns, _local_columns)


def scatter_sequence_gather_columns(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """All-to-all from all tokens with some columns to some tokens with all columns.

    (batch, sequence, hidden / ranks) -> (batch, sequence / ranks, hidden).
    """
    return _conjugate_pair(tensor, group, _scatter_sequence_gather_columns, _scatter_columns_gather_sequence)
