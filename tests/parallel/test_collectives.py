"""Differentiable collectives, on four ranks."""

import pytest
import torch
import torch.distributed as dist

from pipeline.layers.embedding import OutputHead
from pipeline.layers.loss import IGNORE
from pipeline.layers.mask import Mask
from pipeline.parallel import collectives
from tests.helpers import one_in


def _inner_products() -> list[float]:
    """For each collective f: <f(x), y> - <x, f'(y)>, summed over ranks; zero if the backward pass is the transpose of the forward pass."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    gaps = []
    for f, rows_in, rows_out in ((collectives.gather_sequence, 3, 3 * size), (collectives.reduce_scatter_sequence, 3 * size, 3)):
        chance = torch.Generator().manual_seed(rank)
        x = torch.randn(2, rows_in, 5, generator=chance, dtype=torch.float64, requires_grad=True)
        y = torch.randn(2, rows_out, 5, generator=chance, dtype=torch.float64)
        out = f(x, group)
        (grad,) = torch.autograd.grad(out, x, y)
        gap = ((out * y).sum() - (x * grad).sum()).detach()
        dist.all_reduce(gap)
        gaps.append(float(gap))
    return gaps


def test_sequence_collectives_and_their_gradients_are_transposes(world):
    for gaps in world.run(_inner_products):
        assert max(map(abs, gaps)) < 1e-9


def _regions() -> tuple[float, float, float]:
    """A function of a replicated x, computed with sharded weights between copy and reduce: differences of value and gradient."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    weights = torch.randn(size, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = sum((x @ w).tanh() for w in weights)
    (expected,) = torch.autograd.grad(whole.square().sum(), x)
    parts = collectives.reduce((collectives.copy(x, group) @ weights[rank]).tanh(), group)
    (grad,) = torch.autograd.grad(parts.square().sum(), x)
    shard = x.chunk(size, dim=1)[rank].detach().requires_grad_()
    parts_s = collectives.reduce_scatter_sequence((collectives.gather_sequence(shard, group) @ weights[rank]).tanh(), group)
    (grad_s,) = torch.autograd.grad(parts_s.square().sum(), shard)
    gap = grad_s - expected.chunk(size, dim=1)[rank]
    return float((parts - whole).abs().max()), float((grad - expected).abs().max()), float(gap.abs().max())


def test_regions_equal_the_unsharded_function(world):
    for value, gradient, sequence_gradient in world.run(_regions):
        assert value < 1e-12
        assert gradient < 1e-12
        assert sequence_gradient < 1e-12


class _OwnRow(torch.autograd.Function):
    """Selects this rank's input from those of all ranks; the backward pass gathers the gradients, so that the world is one function."""

    @staticmethod
    def forward(ctx, rows):  # noqa: ARG004 - torch's signature
        return rows[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004 - torch's signature
        return torch.stack(collectives.all_gather(grad.contiguous(), dist.group.WORLD))


class _AllRows(torch.autograd.Function):
    """All-gathers the outputs of all ranks."""

    @staticmethod
    def forward(ctx, row):  # noqa: ARG004 - torch's signature
        return torch.stack(collectives.all_gather(row, dist.group.WORLD))

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004 - torch's signature
        return grad[dist.get_rank()].clone()


def _ring(x, group):
    """Ring attention as a function of one tensor."""
    from pipeline.parallel.ring_attention import RingCore

    q, k, v = x.split((2, 1, 1), dim=1)
    return RingCore(group)(q, k, v, Mask(), window=5)


#: Function -> shape of its input, whether all ranks have the same input, and whether all have the same output.
DIFFERENTIABLE = {
    "copy": ((2, 3), True, False),
    "reduce": ((2, 3), False, True),
    "gather_sequence": ((1, 2, 2), False, False),
    "reduce_scatter_sequence": ((1, 4, 2), False, False),
    "scatter_heads": ((4, 2), True, False),
    "scatter_heads_gather_sequence": ((1, 4, 2, 1), False, False),
    "scatter_sequence_gather_heads": ((1, 1, 8, 1), False, False),
    "ring": ((1, 4, 2, 2), False, False),
}


def _gradcheck(name: str) -> bool:
    """Compare the backward pass, over all ranks together, with finite differences."""
    shape, same_input, same_output = DIFFERENTIABLE[name]
    step = _ring if name == "ring" else getattr(collectives, name)

    def world(x):
        y = step(x if same_input else _OwnRow.apply(x), dist.group.WORLD)
        return y if same_output else _AllRows.apply(y)

    whole = shape if same_input else (dist.get_world_size(), *shape)
    x = torch.randn(whole, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    return torch.autograd.gradcheck(world, x)


@pytest.mark.parametrize("name", one_in(4, reversed(DIFFERENTIABLE)))
def test_gradcheck(world, name):
    assert world.run(_gradcheck, name) == [True] * 4


def _gradcheck_of_the_loss(smoothing: float) -> bool:
    """The same for the cross-entropy over a sharded vocabulary, with a bias, label smoothing and an ignored target."""
    from pipeline.parallel.pieces import slice_weight
    from pipeline.parallel.tensor_parallel import VocabParallelHead

    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    chance = torch.Generator().manual_seed(0)
    hidden, weights = torch.randn(1, 5, 3, generator=chance), torch.randn(size, 2, 3, generator=chance)
    biases = torch.randn(size, 2, generator=chance)
    targets = torch.randint(2 * size, (1, 5), generator=chance)
    targets[0, 2] = IGNORE
    piece = slice_weight("head.weight", (2 * size, 3), "vocab", {"tensor": (size, rank), "expert": (1, 0)})

    def loss(hidden, weights, biases):
        head = VocabParallelHead(OutputHead(2, 3, bias=True, label_smoothing=smoothing), piece, group, lambda x: collectives.copy(x, group))
        del head.weight, head.bias
        head.weight, head.bias = _OwnRow.apply(weights), _OwnRow.apply(biases)
        return head(hidden, targets)

    return torch.autograd.gradcheck(loss, tuple(x.double().requires_grad_() for x in (hidden, weights, biases)))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradcheck_of_the_loss_over_a_sharded_vocabulary(world, smoothing):
    assert world.run(_gradcheck_of_the_loss, smoothing) == [True] * 4
