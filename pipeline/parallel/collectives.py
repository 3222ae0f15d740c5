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
| heads_for_tokens: all-to-all | tokens_for_heads |
| tokens_for_heads: all-to-all | heads_for_tokens |

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


def _heads_for_tokens(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(batch, heads, tokens / ranks, head_dim) -> (batch, heads / ranks, tokens, head_dim): some heads of all tokens."""
    sent = tensor.unflatten(1, (group.size(), -1)).permute(1, 0, 2, 3, 4).contiguous()
    return _all_to_all(sent, group).permute(1, 2, 0, 3, 4).flatten(2, 3)


def _tokens_for_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(batch, heads / ranks, tokens, head_dim) -> (batch, heads, tokens / ranks, head_dim): all heads of some tokens."""
    sent = tensor.unflatten(2, (group.size(), -1)).permute(2, 0, 1, 3, 4).contiguous()
    return _all_to_all(sent, group).transpose(0, 1).flatten(1, 2)


def _all_to_all(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Row i of dim 0 goes to rank i; row i of the result comes from there."""
    received = torch.empty_like(tensor)
    dist.all_to_all_single(received, tensor, group=group)
    return received


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


def heads_for_tokens(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Give heads away for the other ranks' tokens: (batch, heads, tokens / ranks, head_dim) -> (batch, heads / ranks, tokens, head_dim)."""
    return _pair(tensor, group, _heads_for_tokens, _tokens_for_heads)


def tokens_for_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Give tokens away for the other ranks' heads: the inverse of heads_for_tokens, which is its transpose too."""
    return _pair(tensor, group, _tokens_for_heads, _heads_for_tokens)


def gather(tensor: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Every rank's tensor, all of one shape, by rank. Without a gradient."""
    return list(_all_gather_heads(tensor, group).chunk(group.size()))
