"""Losses of preferences: values and gradients are those of the formulas of their papers, also of padding and of certain answers."""

import pytest
import torch

from pipeline.config.schema import REFERENCE_FREE
from pipeline.layers.loss import IGNORE
from pipeline.layers.preference import PreferenceLoss, preference_loss
from tests.layers.preference_losses import expected_losses

KINDS = ("sigmoid", "sigmoid_norm", "hinge", "ipo", "simpo", "orpo")
BETA, MARGIN = 0.7, 0.4


def batch_of(lengths: torch.Tensor, reference: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows with so many targets for each answer."""
    rows, half = len(lengths), int(lengths.max())
    counted = torch.arange(half) < lengths[:, :, None]
    choices = torch.tensor([1, -1])[None, :, None].expand(rows, 2, half).flatten(1)
    return {"targets": torch.where(counted, 5, IGNORE).flatten(1), "choices": choices, "reference": reference}


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_formulas(kind):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (16, 2), generator=generator)
    lengths[3] = 0  # padding
    answers, reference = (-(lengths + 1) * torch.rand(16, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    if kind in REFERENCE_FREE:
        reference.zero_()
    ours, theirs = (answers.clone().requires_grad_() for _ in range(2))
    loss, sums = preference_loss(ours, batch_of(lengths, reference), PreferenceLoss(kind, BETA, MARGIN))
    is_pair = torch.arange(16) != 3
    losses, rewards = expected_losses(kind, theirs[is_pair], reference[is_pair], lengths[is_pair], BETA, MARGIN)
    torch.testing.assert_close(loss, losses.sum() / 16)
    torch.testing.assert_close(sums[:2].double(), rewards.sum(0).detach(), rtol=1e-6, atol=1e-6)
    assert sums[2:].tolist() == [float((rewards[:, 0] > rewards[:, 1]).sum()), 15.0]
    loss.backward()
    (losses.sum() / 16).backward()
    assert ours.grad[3].tolist() == [0.0, 0.0]
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert float(ours.grad.abs().max()) > 1e-3


def test_a_certain_answer_has_finite_odds():
    """ORPO's odds p / (1 - p) of an answer with the probability 1, and with one that fp32 cannot tell from 0."""
    answers = torch.tensor([[0.0, -500.0], [-500.0, 0.0], [-1e-9, -1e-9]], requires_grad=True)
    loss, _ = preference_loss(answers, batch_of(torch.full((3, 2), 2), torch.zeros(3, 2)), PreferenceLoss("orpo", BETA))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(answers.grad).all()
