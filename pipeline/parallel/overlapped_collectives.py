"""Collectives in two halves, `start` and `finish`: operations between both run while the data travels.

So do those of the backward pass between the gradients of both: there, `finish` starts the transposed collective and `start` waits for it.
All sizes are known on the host, so that torch.compile traces both halves.

| kind | forward | backward |
|---|---|---|
| ALL_TO_ALL | part i of the equal parts of dim 0 goes to rank i | the same |
| GATHER_COLUMNS | all-gather: (rows, hidden / ranks) -> (rows, hidden) | reduce-scatter |
| REDUCE_SCATTER_COLUMNS | reduce-scatter: (rows, hidden), partial sums -> (rows, hidden / ranks) | all-gather |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pipeline.parallel.collectives import Collective

_OPS = torch.ops._c10d_functional


class Halves(NamedTuple):
    """A collective of one direction.

    Attributes:
        start: tensor -> what is received, which has no values before `finish`.
        finish: what is received -> the result.
    """

    start: Collective
    finish: Collective


class CollectivePair(NamedTuple):
    """A collective and its transpose.

    Attributes:
        forward, backward: both.
        gradient_shape: (tensor, ranks) -> shape of what `backward` receives.
    """

    forward: Halves
    backward: Halves
    gradient_shape: Callable[[Tensor, int], tuple[int, ...]]


class PendingCollective(NamedTuple):
    """A collective that was started.

    Attributes:
        received: for `finish`.
        gradient: takes no memory and has the shape of what the backward pass receives, since autograd verifies the shapes of gradients.
    """

    received: Tensor
    gradient: Tensor


def _wait(received: Tensor, group: ProcessGroup) -> Tensor:  # noqa: ARG001 - a Collective
    result: Tensor = _OPS.wait_tensor(received)
    return result


def _start_all_to_all(tensor: Tensor, group: ProcessGroup) -> Tensor:
    parts = [len(tensor) // group.size()] * group.size()
    received: Tensor = _OPS.all_to_all_single(tensor.contiguous(), parts, parts, group.group_name)
    return received


def _start_gather(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(rows, hidden / ranks) -> (ranks * rows, hidden / ranks)."""
    received: Tensor = _OPS.all_gather_into_tensor(tensor.contiguous(), group.size(), group.group_name)
    return received


def _finish_gather(received: Tensor, group: ProcessGroup) -> Tensor:
    """(ranks * rows, hidden / ranks) -> (rows, hidden)."""
    return _wait(received, group).unflatten(0, (group.size(), -1)).transpose(0, 1).flatten(1)


def _start_reduce_scatter(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """(rows, hidden) -> (rows, hidden / ranks)."""
    pieces = tensor.unflatten(1, (group.size(), -1)).transpose(0, 1).flatten(0, 1).contiguous()
    received: Tensor = _OPS.reduce_scatter_tensor(pieces, "sum", group.size(), group.group_name)
    return received


_EXCHANGE = Halves(_start_all_to_all, _wait)
_GATHER = Halves(_start_gather, _finish_gather)
_REDUCE_SCATTER = Halves(_start_reduce_scatter, _wait)
ALL_TO_ALL = CollectivePair(_EXCHANGE, _EXCHANGE, lambda tensor, _: tuple(tensor.shape))
GATHER_COLUMNS = CollectivePair(_GATHER, _REDUCE_SCATTER, lambda tensor, _: tuple(tensor.shape))
REDUCE_SCATTER_COLUMNS = CollectivePair(_REDUCE_SCATTER, _GATHER, lambda tensor, ranks: (ranks * tensor.shape[0], tensor.shape[1] // ranks))


class _Start(torch.autograd.Function):
    """The first half; its backward pass is the second half of the transposed collective."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, start: Collective, finish: Collective, shape: tuple[int, ...]) -> Any:
        ctx.group, ctx.finish = group, finish
        ctx.set_materialize_grads(False)
        received = start(tensor, group)
        ctx.mark_non_differentiable(received)
        return received, tensor.new_empty(()).expand(shape)

    @staticmethod
    def backward(ctx: Any, _: None, gradient: Tensor) -> Any:
        return ctx.finish(gradient, ctx.group), None, None, None, None


class _Finish(torch.autograd.Function):
    """The second half; its backward pass is the first half of the transposed collective."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, gradient: Tensor, group: ProcessGroup, finish: Collective, start: Collective) -> Tensor:  # noqa: ARG004 - has the gradient
        ctx.group, ctx.start = group, start
        result = finish(received, group)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, ctx.start(grad, ctx.group), None, None, None


def start(kind: CollectivePair, tensor: Tensor, group: ProcessGroup) -> PendingCollective:
    """Start a collective. Differentiable with `finish`, which each collective requires, of the same kind."""
    shape = kind.gradient_shape(tensor, group.size())
    return PendingCollective(*_Start.apply(tensor, group, kind.forward.start, kind.backward.finish, shape))


def finish(kind: CollectivePair, pending: PendingCollective, group: ProcessGroup) -> Tensor:
    """Wait for what was started (on a GPU, the current stream waits), and return the result."""
    result: Tensor = _Finish.apply(pending.received, pending.gradient, group, kind.forward.finish, kind.backward.start)
    return result


def keep_order() -> None:
    """Make inductor keep the order of operations in compiled blocks: two of its passes would move both halves of a collective together."""
    import torch._inductor.config

    torch._inductor.config.reorder_for_peak_memory = False
    torch._inductor.config.reorder_for_locality = False
