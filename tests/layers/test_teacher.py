"""The divergence from a teacher in the fused loss, compared with plain PyTorch on all logits."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.layers import loss
from pipeline.layers.loss import linear_cross_entropy
from pipeline.layers.teacher import Teacher, top_log_probabilities
from tests.layers.test_loss import example


def teacher(rows: int, vocabulary: int, k: int, seed: int = 0, spread: float = 2.0) -> Teacher:
    logits = spread * torch.randn(1, rows, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tokens, logs = top_log_probabilities(logits, k).split([k, k + 1], dim=-1)
    return Teacher(tokens.int(), logs.double())


def plain_losses(logits: torch.Tensor, targets: torch.Tensor, taught: Teacher, weight: float) -> torch.Tensor:
    """The loss of each row, with logits (rows, vocabulary)."""
    tokens, p = taught.tokens.flatten(0, 1).long(), taught.log_probabilities.flatten(0, 1).softmax(dim=1)
    others = torch.ones_like(logits).scatter(1, tokens, 0) == 1
    rest = logits.masked_fill(~others, -torch.inf).logsumexp(dim=1, keepdim=True) if others.any() else logits[:, :0]
    log_q = torch.cat([logits.gather(1, tokens), rest], dim=1) - logits.logsumexp(dim=1, keepdim=True)
    divergence = F.kl_div(log_q, p[:, : log_q.shape[1]], reduction="none").sum(dim=1)
    return (1 - weight) * F.cross_entropy(logits, targets.flatten(), reduction="none") + weight * divergence


@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 9),
    vocabulary=st.integers(2, 11),
    k=st.integers(1, 11),
    chunk=st.integers(1, 10),
    weight=st.sampled_from([0.0, 0.3, 1.0]),
    z_loss=st.sampled_from([0, 0.5]),
    softcap=st.sampled_from([None, 0.8]),
    weighted=st.booleans(),
)
def test_value_and_gradients_equal_plain_pytorch(rows, vocabulary, k, chunk, weight, z_loss, softcap, weighted):
    x, matrix, targets = example(rows, 3, vocabulary)
    taught = teacher(rows, vocabulary, min(k, vocabulary), seed=rows * 100 + vocabulary)
    bias = torch.linspace(-1, 1, vocabulary, dtype=torch.float64, requires_grad=True)
    weights = torch.linspace(0, 2, rows, dtype=torch.float64)[None] if weighted else None
    factor = torch.ones(rows, dtype=torch.float64) if weights is None else weights[0]
    logits = (x @ matrix.t() + bias).flatten(0, 1)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    plain = (plain_losses(logits, targets, taught, weight) * factor).mean()
    with_z = plain + z_loss * (logits.logsumexp(dim=1).square() * factor).mean()
    expected = torch.autograd.grad(with_z, (x, matrix, bias))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss, "chunk_rows", lambda *_: chunk)
        options = {"bias": bias, "weights": weights, "z_loss": z_loss, "softcap": softcap}
        ours = linear_cross_entropy(x, matrix, targets, teacher=taught, teacher_weight=weight, **options)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(torch.autograd.grad(ours, (x, matrix, bias)), expected)


def test_rows_without_a_target_have_no_divergence():
    x, matrix, targets = example(5, 3, 7)
    taught = teacher(5, 7, 3)
    targets[0, 1:3] = loss.IGNORE
    rows = plain_losses((x @ matrix.t()).flatten(0, 1), targets.clamp(min=0), taught, 0.4)
    expected = rows[[0, 3, 4]].sum() / 5
    ours = linear_cross_entropy(x, matrix, targets, teacher=taught, teacher_weight=0.4)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(torch.autograd.grad(ours, (x, matrix)), torch.autograd.grad(expected, (x, matrix)))


@pytest.mark.parametrize("cuts", [[0, 7], [0, 3, 7], [0, 1, 2, 6, 7]])
def test_vocabulary_parallel_pieces_give_the_full_loss(cuts):
    """Every piece runs in its own thread, so that the reductions are sums over all of them."""
    x, matrix, targets = example(6, 3, 7)
    taught, options = teacher(6, 7, 4), {"teacher_weight": 0.6, "z_loss": 0.1}
    whole = linear_cross_entropy(x, matrix, targets, teacher=taught, **options)
    expected_x, expected_matrix = torch.autograd.grad(whole, (x, matrix))
    logits = (x @ matrix.t()).detach().flatten(0, 1)
    largest = logits.amax(1, keepdim=True)
    exponentials, tokens = (logits - largest).exp(), taught.tokens[0].long()
    p = taught.log_probabilities[0].softmax(dim=1)
    kept = exponentials.gather(1, tokens).sum(1)
    target = (logits - largest).gather(1, targets.view(-1, 1)).squeeze(1)
    sums = torch.stack([exponentials.sum(1) - kept, target, kept, (p[:, :-1] * (logits - largest).gather(1, tokens)).sum(1)])
    grad_x = torch.zeros_like(x)
    for first, last in itertools.pairwise(cuts):
        piece = matrix.detach()[first:last].requires_grad_()
        own: list[torch.Tensor] = []
        reduced = {"reduce_max": lambda _: largest, "reduce_sum": lambda found, own=own: own.append(found) or sums.clone()}
        part = linear_cross_entropy(x, piece, targets, teacher=taught, first_token=first, **options, **reduced)
        torch.testing.assert_close(part, whole)
        part_x, part_matrix = torch.autograd.grad(part, (x, piece))
        torch.testing.assert_close(part_matrix, expected_matrix[first:last])
        grad_x += part_x
        inside = exponentials[:, first:last].sum(1) - own[0][2]
        torch.testing.assert_close(own[0][0], inside, msg="the rest of a piece is that of its own columns")
    torch.testing.assert_close(grad_x, expected_x)


def test_a_model_that_is_sure_of_the_teachers_tokens_has_a_finite_loss():
    """All other tokens have an exponential of 0 in fp32, and the teacher gives them something."""
    x, matrix = torch.tensor([[[300.0]]], requires_grad=True), torch.tensor([[1.0], [0.0], [-1.0]], requires_grad=True)
    taught = Teacher(torch.tensor([[[0]]]), torch.tensor([[[-0.01, -4.6]]], dtype=torch.float16))
    found = linear_cross_entropy(x, matrix, torch.zeros(1, 1, dtype=torch.int64), teacher=taught)
    found.backward()
    assert torch.isfinite(found)
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(matrix.grad).all()


def test_bf16_gradients_are_near():
    x, matrix, targets = example(64, 32, 50, torch.bfloat16)
    taught = teacher(64, 50, 8)
    linear_cross_entropy(x, matrix, targets, teacher=taught, teacher_weight=0.5).backward()
    reference = matrix.detach().double().requires_grad_()
    plain_losses((x.detach().double() @ reference.t()).flatten(0, 1), targets, taught, 0.5).mean().backward()
    torch.testing.assert_close(matrix.grad.double(), reference.grad, rtol=0.03, atol=2e-3)


def test_the_top_tokens_and_the_rest_are_a_distribution():
    logits = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(1)) * 4
    tokens, logs = top_log_probabilities(logits, 7).split([7, 8], dim=-1)
    expected = logits.softmax(dim=-1).sort(dim=-1, descending=True)
    assert tokens.long().tolist() == expected.indices[..., :7].tolist()
    torch.testing.assert_close(logs.exp()[..., :7], expected.values[..., :7])
    torch.testing.assert_close(logs.exp()[..., 7], expected.values[..., 7:].sum(dim=-1))
    assert top_log_probabilities(logits, 40)[..., -1].tolist() == [[-torch.inf] * 3] * 2
