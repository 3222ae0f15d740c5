"""Collectives with a gradient: the pairs f, g of Shoeybi et al. 2019 and their sequence forms of Korthikanti et al. 2022.

| forward | backward |
|---|---|
| copy: nothing | all-reduce |
| reduce: all-reduce | nothing |
| gather_sequence: all-gather | reduce-scatter |
| reduce_scatter_sequence: reduce-scatter | all-gather |
| scatter_sequence: take own rows | all-gather |
| own_heads: take own heads | all-gather |
| total: all-reduce | all-reduce |
| share: nothing | divide by the ranks |

Activations are (batch, sequence, hidden); the sequence forms cut dim 1. Inputs are cloned before an in-place collective,
since autograd may hand the same buffer to others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def all_reduce(tensor: Tensor, group: ProcessGroup, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """The reduction over the group as a new tensor."""
    if group.size() == 1:
        return tensor
    reduced = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(reduced, op=op, group=group)
    return reduced


def _all_gather_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(batch, sequence / ranks, hidden) of every rank -> (batch, sequence, hidden)."""
    gathered = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=group)
    return gathered.unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1, 2)


def _reduce_scatter_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(batch, sequence, hidden), summed over ranks -> this rank's (batch, sequence / ranks, hidden)."""
    pieces = tensor.unflatten(1, (group.size(), -1)).transpose(0, 1).flatten(0, 1).contiguous()
    mine = pieces.new_empty((tensor.shape[0], *pieces.shape[1:]))
    dist.reduce_scatter_tensor(mine, pieces, group=group)
    return mine


def _own_rows(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's part of the sequence."""
    return tensor.chunk(group.size(), dim=1)[group.rank()].contiguous()


def _own_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """This rank's part of dim 0."""
    return tensor.chunk(group.size())[group.rank()].contiguous()


def _all_gather_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(heads / ranks, ...) of every rank -> (heads, ...)."""
    gathered = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=group)
    return gathered


Step = Callable[[Tensor, ProcessGroup], Tensor]


def _same(tensor: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ARG001 - a Step
    """Nothing to do."""
    return tensor.view_as(tensor)


class _Pair(torch.autograd.Function):
    """One step forward, its transpose backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, ahead: Step, back: Step) -> Tensor:
        ctx.group, ctx.back = group, back
        return ahead(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad, ctx.group), None, None, None


def _pair(tensor: Tensor, group: ProcessGroup, ahead: Step, back: Step) -> Tensor:
    result: Tensor = _Pair.apply(tensor, group, ahead, back)
    return result


def copy(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Enter a region where every rank holds a piece of the weights."""
    return _pair(tensor, group, _same, all_reduce)


def reduce(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Leave that region: sum the ranks' parts."""
    return _pair(tensor, group, all_reduce, _same)


def gather_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Enter the region from activations that are cut along the sequence."""
    return _pair(tensor, group, _all_gather_sequence, _reduce_scatter_sequence)


def reduce_scatter_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Leave the region to activations that are cut along the sequence."""
    return _pair(tensor, group, _reduce_scatter_sequence, _all_gather_sequence)


def scatter_sequence(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Cut activations that every rank holds whole."""
    return _pair(tensor, group, _own_rows, _all_gather_sequence)


def share(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Leave a region where every rank computed the same: each rank's gradient is a part of the whole."""
    return _pair(tensor, group, _same, lambda grad, group: grad / group.size())


def own_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Take this rank's attention heads of something that every rank holds for all, (heads, ...)."""
    return _pair(tensor, group, _own_heads, _all_gather_heads)


def total(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over ranks each of which goes on with a loss of its own that depends on the sum; gradients are averaged over them later."""
    return _pair(tensor, group, all_reduce, all_reduce)
