"""Expert parallelism: each rank holds a subset of the experts; an all-to-all sends tokens to their experts and back.

As in GShard (Lepikhin et al. 2021, https://arxiv.org/abs/2006.16668), but without a fixed capacity: the number of rows per rank is dynamic.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeline.layers.moe import inverse_permutation, moe_layers, permute
from pipeline.parallel import collectives
from pipeline.parallel.mesh import Mesh


class _AllToAll(torch.autograd.Function):
    """All-to-all with uneven splits; the backward pass exchanges the splits."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, input_splits: list[int], output_splits: list[int], group: ProcessGroup) -> Tensor:
        ctx.input_splits, ctx.output_splits, ctx.group = input_splits, output_splits, group
        return _all_to_all(rows, input_splits, output_splits, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, ctx.output_splits, ctx.input_splits, ctx.group), None, None, None


def _all_to_all(rows: Tensor, input_splits: list[int], output_splits: list[int], group: ProcessGroup) -> Tensor:
    received = rows.new_empty((sum(output_splits), *rows.shape[1:]))
    dist.all_to_all_single(received, rows.contiguous(), output_splits, input_splits, group=group)
    return received


def all_to_all(rows: Tensor, input_splits: list[int], output_splits: list[int], group: ProcessGroup) -> Tensor:
    """Send each rank its rows. Differentiable.

    Args:
        rows: (rows, hidden), ordered by destination rank.
        input_splits: number of rows to send to each rank; sums to all rows.
        output_splits: number of rows to receive from each rank.
        group: the process group.

    Returns:
        (received rows, hidden), ordered by source rank.
    """
    result: Tensor = _AllToAll.apply(rows, input_splits, output_splits, group)
    return result


class ExpertParallelExperts(nn.Module):
    """Drop-in replacement for Experts whose experts are sharded over a group: same arguments, same result.

    Args:
        experts: the local experts; each rank of the group holds the same number, in rank order.
        group: the expert-parallel group.
    """

    def __init__(self, experts: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.experts, self.group = experts, group

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """As Experts in layers/moe.py, with the counts of all experts. Synchronizes the host with the device to read the splits."""
        received_counts = torch.empty_like(counts)
        dist.all_to_all_single(received_counts, counts, group=self.group)
        # Both (ranks, local experts): rows to send to each rank's experts, and rows to receive from each rank for the local experts.
        sent_counts, received_counts = (table.view(self.group.size(), -1) for table in (counts, received_counts))
        if x.is_meta:  # the planner has no values: every expert gets the same number of rows
            input_splits = output_splits = [x.shape[0] // self.group.size()] * self.group.size()
        else:
            input_splits, output_splits = torch.stack([sent_counts.sum(dim=1), received_counts.sum(dim=1)]).tolist()
        routed = sum(input_splits)
        rows = all_to_all(x[:routed], input_splits, output_splits, self.group)
        order = _order_by_expert(received_counts, sum(output_splits))
        inverse_order = inverse_permutation(order)
        outputs = self.experts(permute(rows, order, inverse_order), received_counts.sum(dim=0))
        combined = all_to_all(permute(outputs, inverse_order, order), output_splits, input_splits, self.group)
        return torch.cat([combined, combined.new_zeros(x.shape[0] - routed, combined.shape[1])])


def _order_by_expert(counts: Tensor, rows: int) -> Tensor:
    """Return the permutation from rows ordered by (rank, expert) to rows ordered by (expert, rank).

    Args:
        counts: int64 (ranks, experts), rows of each rank for each expert.
        rows: their sum, known on the host.
    """
    expert = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return expert.repeat_interleave(counts.flatten(), output_size=rows).argsort(stable=True)


def apply(model: nn.Module, mesh: Mesh) -> None:
    """Make every MoE layer dispatch over the expert group, and its statistics cover full sequences under context parallelism."""
    for moe in list(moe_layers(model)):
        if mesh.layout.expert > 1:
            moe.experts = ExpertParallelExperts(moe.experts, mesh.expert)
        if mesh.layout.context > 1:
            moe.reduce_sums = partial(collectives.all_reduce_with_grad, group=mesh.context)
