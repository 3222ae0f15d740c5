"""The fused linear cross-entropy compared with PyTorch's, and its hand-written backward pass with finite differences."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.layers import loss
from pipeline.layers.loss import linear_cross_entropy
from tests.world import Observed


def example(rows: int, hidden: int, vocabulary: int, dtype=torch.float64):
    chance = torch.Generator().manual_seed(rows * 1000 + hidden * 10 + vocabulary)
    x = torch.randn(1, rows, hidden, generator=chance, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden, generator=chance, dtype=torch.float64).to(dtype).requires_grad_()
    return x, weight, torch.randint(vocabulary, (1, rows), generator=chance)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 9),
    hidden=st.integers(1, 5),
    vocabulary=st.integers(1, 11),
    chunk=st.integers(1, 10),
    scale=st.floats(0.1, 3),
    z_loss=st.sampled_from([0, 0.01, 2]),
    softcap=st.sampled_from([None, 0.8]),
)
def test_value_and_gradients_equal_the_unfused_form(rows, hidden, vocabulary, chunk, scale, z_loss, softcap):
    x, weight, targets = example(rows, hidden, vocabulary)
    logits = (x @ weight.t()).flatten(0, 1)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    plain = F.cross_entropy(logits, targets.flatten()) * scale
    with_z = plain + z_loss * logits.logsumexp(dim=1).square().mean() * scale
    expected = torch.autograd.grad(with_z, (x, weight))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "chunk_rows", lambda *_: chunk)
        ours = linear_cross_entropy(x, weight, targets, z_loss=z_loss, softcap=softcap) * scale
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(torch.autograd.grad(ours, (x, weight)), expected)


def test_gradcheck():
    x, weight, targets = example(5, 3, 7)
    assert torch.autograd.gradcheck(lambda a, b: linear_cross_entropy(a, b, targets), (x, weight))


@pytest.mark.parametrize("softcap", [None, 0.8])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradcheck_with_bias_smoothing_a_soft_cap_and_ignored_targets(smoothing, softcap):
    x, weight, targets = example(5, 3, 7)
    bias = torch.linspace(-1, 1, 7, dtype=torch.float64, requires_grad=True)
    targets[0, 1:3] = loss.IGNORE
    options = {"label_smoothing": smoothing, "softcap": softcap}
    assert torch.autograd.gradcheck(lambda a, b, c: linear_cross_entropy(a, b, targets, bias=c, **options), (x, weight, bias))
    logits = (x @ weight.t() + bias).flatten(0, 1)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    plain = F.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing, reduction="sum") / 5
    torch.testing.assert_close(linear_cross_entropy(x, weight, targets, bias=bias, **options), plain)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_weights_of_positions(smoothing):
    """Weights multiply the loss of each position, 0 included; targets without a loss have none, whatever their weight."""
    x, weight, targets = example(6, 3, 7)
    weights = torch.tensor([[2.0, 0.0, 5.0, 1.5, 7.0, 1.0]], dtype=torch.float64)
    targets[0, 4] = loss.IGNORE
    losses = F.cross_entropy((x @ weight.t()).flatten(0, 1), targets.flatten(), label_smoothing=smoothing, reduction="none")
    plain = (losses * weights.flatten()).sum() / 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "chunk_rows", lambda *_: 4)
        ours = linear_cross_entropy(x, weight, targets, weights=weights, label_smoothing=smoothing)
    torch.testing.assert_close(ours, plain)
    expected = torch.autograd.grad(plain, (x, weight))
    torch.testing.assert_close(torch.autograd.grad(ours, (x, weight)), expected)


@pytest.mark.parametrize("cuts", [[0, 7], [0, 3, 7], [0, 3, 6, 7], [0, 4, 7, 7]])
@pytest.mark.parametrize("z_loss", [0, 0.1])
def test_vocabulary_parallel_pieces_give_the_full_loss(cuts, z_loss):
    """Each piece runs separately with the reduced sums of all pieces; losses agree and input gradients add up."""
    x, weight, targets = example(5, 3, 7)
    targets[0, 2] = loss.IGNORE
    whole = linear_cross_entropy(x, weight, targets, z_loss=z_loss)
    expected_x, expected_weight = torch.autograd.grad(whole, (x, weight))
    logits = (x @ weight.t()).detach().flatten(0, 1)
    largest = logits.amax(1, keepdim=True)
    sums = torch.stack([(logits - largest).exp().sum(1), (logits - largest).gather(1, targets.view(-1, 1).clamp(min=0)).squeeze(1)])
    grad_x = torch.zeros_like(x)
    for first, last in itertools.pairwise(cuts):
        if first == last:
            continue
        piece = weight.detach()[first:last].requires_grad_()
        reduced = {"reduce_max": lambda _: largest, "reduce_sum": lambda _: sums}
        part = linear_cross_entropy(x, piece, targets, z_loss=z_loss, first_token=first, **reduced)
        torch.testing.assert_close(part, whole)
        part_x, part_weight = torch.autograd.grad(part, (x, piece))
        torch.testing.assert_close(part_weight, expected_weight[first:last])
        grad_x += part_x
    torch.testing.assert_close(grad_x, expected_x)


def test_bf16_gradient_of_the_weight_is_fp32_and_near():
    x, weight, targets = example(64, 32, 50, torch.bfloat16)
    weight.grad_dtype = torch.float32
    linear_cross_entropy(x, weight, targets).backward()
    reference = weight.detach().float().requires_grad_()
    F.cross_entropy((x.detach().float() @ reference.t()).flatten(0, 1), targets.flatten()).backward()
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, reference.grad, rtol=0.02, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_backward_pass_does_not_copy_the_gradient_of_the_weight(dtype):
    x, weight, targets = example(64, 8, 500, dtype)
    weight.grad_dtype = torch.float32
    allocated = []

    def note(_operator, args, result):
        known = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known:
            allocated.append(result.numel())

    for micro_batch in range(2):
        scaled = linear_cross_entropy(x, weight, targets) * 0.5
        with Observed(note):
            scaled.backward()
        assert 0 < max(allocated) < weight.numel(), f"micro-batch {micro_batch}"
    reference = weight.detach().float().requires_grad_()
    F.cross_entropy((x.detach().float() @ reference.t()).flatten(0, 1), targets.flatten()).backward()
    torch.testing.assert_close(weight.grad, reference.grad, rtol=0.02, atol=2e-3 if dtype == torch.bfloat16 else 1e-6)


def test_a_kept_graph_gives_the_same_gradients_twice():
    x, weight, targets = example(5, 3, 7)
    scaled = linear_cross_entropy(x, weight, targets) * 0.5
    first = torch.autograd.grad(scaled, (x, weight), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(scaled, (x, weight)), first, rtol=0, atol=0)
