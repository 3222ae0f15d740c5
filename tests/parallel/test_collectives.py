"""Differentiable collectives, on four ranks; those of attention: test_context.py."""

import torch
import torch.distributed as dist

from pipeline.layers.embedding import OutputHead
from pipeline.layers.loss import IGNORE
from pipeline.parallel import collectives


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


def _heads() -> tuple[bool, bool]:
    """Whether a rank gets its heads of a replicated tensor, and the gradient has those of all ranks."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x, factors = torch.randn(2, 2 * size, 3, generator=torch.Generator().manual_seed(0)).unbind()
    own = slice(2 * rank, 2 * rank + 2)
    heads = collectives.scatter_heads(x.requires_grad_(), group)
    (grad,) = torch.autograd.grad((heads * factors[own]).sum(), x)
    return torch.equal(heads, x[own]), torch.equal(grad, factors)


def test_heads_of_a_replicated_tensor_have_the_gradients_of_all_ranks(world):
    assert world.run(_heads) == [(True, True)] * 4


class _OwnRow(torch.autograd.Function):
    """Selects this rank's input from those of all ranks; the backward pass gathers the gradients, so that the world is one function."""

    @staticmethod
    def forward(ctx, rows):  # noqa: ARG004 - torch's signature
        return rows[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004 - torch's signature
        return torch.stack(collectives.all_gather(grad.contiguous(), dist.group.WORLD))


def _gradcheck_of_the_loss() -> bool:
    """Compare the backward pass of the cross-entropy over a sharded vocabulary, over all ranks together, with finite differences."""
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
        head = VocabParallelHead(OutputHead(2, 3, bias=True, label_smoothing=0.1), piece, group, lambda x: collectives.copy(x, group))
        del head.weight, head.bias
        head.weight, head.bias = _OwnRow.apply(weights), _OwnRow.apply(biases)
        return head(hidden, targets)

    return torch.autograd.gradcheck(loss, tuple(x.double().requires_grad_() for x in (hidden, weights, biases)), fast_mode=True)


def test_gradcheck_of_the_loss_over_a_sharded_vocabulary(world):
    """With a bias, label smoothing and an ignored target."""
    assert world.run(_gradcheck_of_the_loss) == [True] * 4
