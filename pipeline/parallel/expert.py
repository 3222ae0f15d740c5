"""Expert parallelism: each rank holds some of the experts, and tokens travel to them and back by all-to-all.

As in GShard (Lepikhin et al. 2021, https://arxiv.org/abs/2006.16668), but each rank gets as many rows as it has work, no fixed number.
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


class _Exchange(torch.autograd.Function):
    """Rows to their ranks; the gradients go back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    arrived = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def exchange(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    """Send each rank its rows.

    Args:
        rows: (rows, hidden), those for rank 0 first.
        sent: how many go to each rank; their sum is all of them.
        received: how many come from each.
        group: the ranks.

    Returns:
        (rows received, hidden), those from rank 0 first.
    """
    result: Tensor = _Exchange.apply(rows, sent, received, group)
    return result


class RemoteExperts(nn.Module):
    """This rank's experts in the place of all: same arguments, same result.

    Args:
        experts: this rank's share of the stacks; the ranks of the group hold equally many, in their order.
        group: the expert ranks.
    """

    def __init__(self, experts: nn.Module, group: ProcessGroup) -> None:
        super().__init__()
        self.experts, self.group = experts, group

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """As layers/moe.py Experts, with the counts of all experts. The host waits for the numbers of rows."""
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=self.group)
        # Both (ranks, experts a rank): rows for each rank's experts, and rows from each rank for this one's.
        going, coming = (table.view(self.group.size(), -1) for table in (counts, coming))
        sent, received = torch.stack([going.sum(dim=1), coming.sum(dim=1)]).tolist()
        travelling = sum(sent)
        arrived = exchange(x[:travelling], sent, received, self.group)
        order = _by_expert(coming, sum(received))
        back = inverse_permutation(order)
        done = self.experts(permute(arrived, order, back), coming.sum(dim=0))
        home = exchange(permute(done, back, order), received, sent, self.group)
        return torch.cat([home, home.new_zeros(x.shape[0] - travelling, home.shape[1])])


def _by_expert(coming: Tensor, rows: int) -> Tensor:
    """The order that puts rows which stand by rank, then expert, by expert, then rank.

    Args:
        coming: int64 (ranks, experts), rows of each.
        rows: their sum, which the host knows.
    """
    expert = torch.arange(coming.shape[1], device=coming.device).repeat(coming.shape[0])
    return expert.repeat_interleave(coming.flatten(), output_size=rows).argsort(stable=True)


def apply(model: nn.Module, mesh: Mesh) -> None:
    """Let every moe reach the experts of all ranks, where their stacks are cut, and count whole sequences, where those are."""
    for moe in list(moe_layers(model)):
        if mesh.layout.expert > 1:
            moe.experts = RemoteExperts(moe.experts, mesh.expert)
        if mesh.layout.context > 1:
            moe.reduce_sums = partial(collectives.total, group=mesh.context)
