"""Collectives with a gradient, on four real ranks."""

import torch
import torch.distributed as dist

from pipeline.parallel import collectives


def _inner_products() -> list[float]:
    """For each collective f: <f(x), y> summed over ranks, minus <x, f'(y)> summed over ranks. Zero when backward is forward's transpose."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    gaps = []
    for f, rows_in, rows_out in (
        (collectives.gather_sequence, 3, 3 * size),
        (collectives.reduce_scatter_sequence, 3 * size, 3),
    ):
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
    """A function of a replicated x, computed in pieces between copy and reduce: value and gradient against the whole."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    weights = torch.randn(size, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    whole = sum((x @ w).tanh() for w in weights)
    (expected,) = torch.autograd.grad(whole.square().sum(), x)
    parts = collectives.reduce((collectives.copy(x, group) @ weights[rank]).tanh(), group)
    (grad,) = torch.autograd.grad(parts.square().sum(), x)
    shard = collectives.scatter_sequence(x, group)
    parts_s = collectives.reduce_scatter_sequence((collectives.gather_sequence(shard, group) @ weights[rank]).tanh(), group)
    (grad_s,) = torch.autograd.grad(parts_s.square().sum(), x)
    return float((parts - whole).abs().max()), float((grad - expected).abs().max()), float((grad_s - expected).abs().max())


def test_regions_equal_the_undivided_function(world):
    for value, gradient, sequence_gradient in world.run(_regions):
        assert value < 1e-12
        assert gradient < 1e-12
        assert sequence_gradient < 1e-12
