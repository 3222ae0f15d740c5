"""Expert parallelism: each rank holds a subset of the experts; an all-to-all sends tokens to their experts and back.

As in GShard (Lepikhin et al. 2021, https://arxiv.org/abs/2006.16668), with the fixed capacity that it has (`dispatch_padded`), or without:
the number of rows of a rank is then dynamic, and the host reads it, or they travel in buffers that have more rows than the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipeline.config.parallel import ParallelConfig
from pipeline.layers.experts import Experts, RoutedExperts
from pipeline.layers.moe import Buffers, moe_layers
from pipeline.layers.row_counts import counts_on_host
from pipeline.layers.stack import Stack
from pipeline.layers.token_permutation import Slots, inverse_permutation, permute, sorted_slots
from pipeline.layers.uncompiled import uncompiled
from pipeline.parallel import collectives
from pipeline.parallel.mesh import Mesh
from pipeline.parallel.overlapped_collectives import ALL_TO_ALL, GATHER_COLUMNS, REDUCE_SCATTER_COLUMNS, PendingCollective, finish, start


class Exchange:
    """An all-to-all of rows with uneven splits. The rows travel between `start` and `finish`, in the backward pass the other way.

    Args:
        input_splits: number of rows to send to each rank; sums to all rows.
        output_splits: number of rows to receive from each rank.
        group: the process group.
    """

    def __init__(self, input_splits: list[int], output_splits: list[int], group: ProcessGroup) -> None:
        self._splits, self._group = (input_splits, output_splits), group
        self._work: Any = None
        self._gradient: Tensor | None = None

    def start(self, rows: Tensor) -> Tensor:
        """Start to send rows, (rows, hidden) ordered by destination rank. The result has no values before `finish`. Differentiable."""
        received: Tensor = _StartExchange.apply(rows, self)
        return received

    def finish(self, received: Tensor) -> Tensor:
        """Wait for the rows, (received rows, hidden) ordered by source rank. Differentiable."""
        rows: Tensor = _FinishExchange.apply(received, self)
        return rows

    def returning(self) -> Exchange:
        """The exchange in the other direction."""
        return Exchange(self._splits[1], self._splits[0], self._group)

    def transfer(self, rows: Tensor) -> Tensor:
        """`start` and `finish`."""
        return self.finish(self.start(rows))

    def _send(self, rows: Tensor, input_splits: list[int], output_splits: list[int]) -> Tensor:
        received = rows.new_empty((sum(output_splits), *rows.shape[1:]))
        self._work = dist.all_to_all_single(received, rows.contiguous(), output_splits, input_splits, group=self._group, async_op=True)
        return received

    def _wait(self) -> None:
        """Wait for the rows (on a GPU, the current stream waits)."""
        if self._work is not None:  # None from a fake process group
            self._work.wait()
            self._work = None


class _StartExchange(torch.autograd.Function):
    """Exchange.start; its backward pass ends the exchange of the gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange._send(rows, *exchange._splits)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        ctx.exchange._wait()
        gradient, ctx.exchange._gradient = ctx.exchange._gradient, None
        return gradient, None


class _FinishExchange(torch.autograd.Function):
    """Exchange.finish; its backward pass starts the exchange of the gradients, which _StartExchange returns: its rows are other ones."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange._wait()
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.exchange._gradient = ctx.exchange._send(grad, *reversed(ctx.exchange._splits))
        return grad, None


class ExpertParallelExperts(RoutedExperts):
    """Drop-in replacement for Experts whose experts are sharded over a group: same arguments, same result.

    With tensor parallelism that slices every expert, all tensor ranks route the same tokens. Each sends its own columns of them, so that a
    token crosses the network once, and the experts' tensor ranks gather the columns. Arguments and results of `forward` then have these
    columns only.

    Args:
        experts: the local experts; each rank of the group holds the same number, in rank order.
        group: the expert-parallel group; with whole experts, that of all tensor and expert ranks.
        tensor: the tensor-parallel group, whose ranks hold slices of the same experts; None for whole experts.
    """

    def __init__(self, experts: Experts, group: ProcessGroup, tensor: ProcessGroup | None = None) -> None:
        super().__init__()
        self.experts, self.group = experts, group
        self.tensor = tensor if tensor is not None and tensor.size() > 1 else None

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """As Experts in layers/experts.py, with the counts of all experts."""
        return self.dispatch(x, counts)()

    @uncompiled  # the numbers of rows change with every micro-batch
    def dispatch(self, x: Tensor, counts: Tensor) -> Callable[[], Tensor]:
        """See RoutedExperts. Synchronizes the host with the device once, to read the splits."""
        received_counts = torch.empty_like(counts)
        dist.all_to_all_single(received_counts, counts, group=self.group)
        # Both (ranks, local experts): rows to send to each rank's experts, and rows to receive from each rank for the local experts.
        sent_counts, received_counts = (table.view(self.group.size(), -1) for table in (counts, received_counts))
        ranks = self.group.size()
        splits = counts_on_host(torch.cat([sent_counts.sum(dim=1), received_counts.sum(dim=1)]), 2 * len(x))
        input_splits, output_splits = splits[:ranks], splits[ranks:]
        exchange = Exchange(input_splits, output_splits, self.group)
        return partial(self._compute, len(x), exchange, exchange.start(x[: sum(input_splits)]), received_counts)

    @uncompiled
    def _compute(self, length: int, exchange: Exchange, pending: Tensor, received_counts: Tensor) -> Tensor:
        """Apply the local experts to the rows that arrive, and send the outputs back: `length` rows, those without an expert at the end."""
        rows = exchange.finish(pending)
        if self.tensor is not None:
            rows = collectives.gather_columns(rows, self.tensor)
        order = _order_by_expert(received_counts, len(rows))
        inverse_order = inverse_permutation(order)
        outputs = self.experts(permute(rows, order, inverse_order), received_counts.sum(dim=0))
        outputs = permute(outputs, inverse_order, order)
        if self.tensor is not None:
            outputs = collectives.reduce_scatter_columns(outputs, self.tensor)
        combined = exchange.returning().transfer(outputs)
        return torch.cat([combined, combined.new_zeros(length - len(combined), combined.shape[1])])

    def serve(self) -> None:
        """Apply the local experts to rows of the other ranks, which call `forward` or `serve` at the same time; this rank has no rows."""
        local, _, hidden = self.experts.up.shape
        columns = hidden if self.tensor is None else hidden // self.tensor.size()
        counts = torch.zeros(self.group.size() * local, dtype=torch.int64, device=self.experts.up.device)
        self.forward(self.experts.up.new_empty(0, columns), counts)

    def dispatch_padded(self, parts: Sequence[Tensor], counts: Tensor | None = None) -> Callable[[], list[Tensor]]:
        """See RoutedExperts. All parts are sent at once. Each returns while the next one is computed."""
        ranks, sent = self.group.size(), None
        if counts is not None:  # every rank gets those of its experts
            sent = start(ALL_TO_ALL, counts.view(len(parts), ranks, -1).transpose(0, 1).contiguous(), self.group)
        pending = [start(ALL_TO_ALL, part.flatten(0, 1), self.group) for part in parts]
        return partial(self._compute_padded, pending, sent, len(parts[0]))

    def _compute_padded(self, pending: Sequence[PendingCollective], counts: PendingCollective | None, blocks: int) -> list[Tensor]:
        """Apply the local experts to the parts that arrive, and send the outputs back.

        The tensor ranks gather the columns of a part beside the last product of the part before, and reduce its sums beside the first
        products of the part after.
        """
        returning: list[PendingCollective] = []
        orders: list[Slots | None] = [None] * len(pending)
        if counts is not None:
            rows = len(pending[0].received) // self.group.size()
            orders = [sorted_slots(table, rows) for table in finish(ALL_TO_ALL, counts, self.group).unbind(1)]
        arriving, reduced = self._gather(pending[0]), None
        for order, following in zip(orders, (*pending[1:], None), strict=True):
            numbers = None if order is None else order.counts
            inner = self.experts.inner(self._by_expert(arriving, order), numbers)
            if reduced is not None:
                returning.append(self._return(reduced))
            if following is not None:
                arriving = self._gather(following)
            outputs = self.experts.outer(inner, numbers)
            if order is None:
                outputs = outputs.unflatten(1, (self.group.size(), -1)).transpose(0, 1).flatten(0, 2)
            else:  # rows without an assignment, which no expert has computed, become zeros
                outputs = permute(outputs, order.slot, order.assignment, partial=True)
            if self.tensor is None:
                returning.append(start(ALL_TO_ALL, outputs, self.group))
            else:
                reduced = start(REDUCE_SCATTER_COLUMNS, outputs, self.tensor)
        if reduced is not None:
            returning.append(self._return(reduced))
        return [finish(ALL_TO_ALL, part, self.group).unflatten(0, (blocks, -1)) for part in returning]

    def _gather(self, pending: PendingCollective) -> PendingCollective:
        """With tensor parallelism, wait for a part and begin to gather its columns."""
        if self.tensor is None:
            return pending
        return start(GATHER_COLUMNS, finish(ALL_TO_ALL, pending, self.group), self.tensor)

    def _by_expert(self, arriving: PendingCollective, order: Slots | None) -> Tensor:
        """Wait for the rows of a part with all columns: (local experts, rows, hidden), or sorted by expert (rows, hidden)."""
        rows = finish(ALL_TO_ALL, arriving, self.group) if self.tensor is None else finish(GATHER_COLUMNS, arriving, self.tensor)
        if order is not None:
            return permute(rows, order.assignment, order.slot, partial=True)
        return rows.unflatten(0, (self.group.size(), len(self.experts.up), -1)).transpose(0, 1).flatten(1, 2)

    def _return(self, reduced: PendingCollective) -> PendingCollective:
        """Wait for the sums of a part over the tensor ranks, and begin to send them back to the ranks of their tokens."""
        assert self.tensor is not None
        return start(ALL_TO_ALL, finish(REDUCE_SCATTER_COLUMNS, reduced, self.tensor), self.group)


def _order_by_expert(counts: Tensor, rows: int) -> Tensor:
    """Return the permutation from rows ordered by (rank, expert) to rows ordered by (expert, rank).

    Args:
        counts: int64 (ranks, experts), rows of each rank for each expert.
        rows: their sum, known on the host.
    """
    expert = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
    return expert.repeat_interleave(counts.flatten(), output_size=rows).argsort(stable=True)


def _own_part(whole: Tensor, group: ProcessGroup) -> Tensor:
    """(tokens, hidden) -> (tokens, hidden / ranks), or (batch, sequence) -> (batch, sequence / ranks)."""
    return whole.chunk(group.size(), dim=1)[group.rank()]


def _sum_over(sums: Tensor, group: ProcessGroup, then: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Sum over the tensor ranks, then over those of context parallelism."""
    summed = collectives.all_reduce_with_grad(sums, group)
    return summed if then is None else then(summed)


@contextmanager
def without_buffers(stages: Iterable[Stack]) -> Iterator[None]:
    """A context in which the MoE layers of these stages wait for the numbers of rows."""
    layers = [moe for stage in stages for moe in moe_layers(stage)]
    for moe in layers:
        moe.exact = True
    try:
        yield
    finally:
        for moe in layers:
            moe.exact = False


def apply(model: nn.Module, mesh: Mesh, parallel: ParallelConfig) -> None:
    """Make every MoE layer dispatch over the ranks of its experts, and its statistics cover full sequences where ranks share them."""
    layout = mesh.layout
    for moe in list(moe_layers(model)):
        if parallel.expert_padding:
            moe.parts = parallel.expert_parts if layout.expert_ranks > 1 else 1
        if layout.expert_ranks > 1:
            assert isinstance(moe.experts, Experts), "the layer is already connected"
            if parallel.expert_padding and moe.capacity_factor is None:
                # At most every token to as many experts of a rank as it can have there.
                most = layout.expert_ranks * min(moe.router.top_k, len(moe.experts.up)) / moe.router.top_k
                moe.row_buffers = Buffers(layout.expert_ranks, min(parallel.expert_buffer, most))
            moe.experts = ExpertParallelExperts(moe.experts, mesh.dispatch, None if layout.folded else mesh.tensor)
            if layout.tensor > 1 and not layout.folded:
                moe.narrow = partial(_own_part, group=mesh.tensor)
        if mesh.layout.context > 1:
            moe.reduce_sums = partial(collectives.all_reduce_with_grad, group=mesh.context)
        if layout.folded:
            moe.own = partial(_own_part, group=mesh.tensor)
            moe.reduce_sums = partial(_sum_over, group=mesh.tensor, then=moe.reduce_sums)
