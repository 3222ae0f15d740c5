"""The losses of preferences, written from their papers and as TRL 1.16 computes them, for tests."""

from __future__ import annotations

import torch


def expected_losses(
    kind: str, answers: torch.Tensor, reference: torch.Tensor, lengths: torch.Tensor, beta: float, margin: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of every pair, (pairs,), and the rewards of its answers, (pairs, 2).

    Args:
        kind: training.preference_loss.
        answers: (pairs, 2), log-probabilities of the preferred answer and of the other one.
        reference: (pairs, 2), the same under the reference model.
        lengths: (pairs, 2), tokens of the answers.
        beta, margin: training.dpo_beta and training.simpo_margin.
    """
    (won, lost), (won_before, lost_before) = answers.unbind(1), reference.unbind(1)
    won_length, lost_length = lengths.unbind(1)
    if kind in ("sigmoid", "hinge"):
        rewards = beta * torch.stack([won - won_before, lost - lost_before], 1)
        delta = rewards[:, 0] - rewards[:, 1]
        return (torch.log(1 + torch.exp(-delta)) if kind == "sigmoid" else torch.clamp(1 - delta, min=0)), rewards
    per_token = torch.stack([won / won_length, lost / lost_length], 1)
    before = torch.stack([won_before / won_length, lost_before / lost_length], 1)
    if kind in ("sigmoid_norm", "ipo"):
        ratios = per_token - before
        delta = ratios[:, 0] - ratios[:, 1]
        return (torch.log(1 + torch.exp(-beta * delta)) if kind == "sigmoid_norm" else (delta - 1 / (2 * beta)) ** 2), beta * ratios
    delta = per_token[:, 0] - per_token[:, 1]
    if kind == "simpo":
        return torch.log(1 + torch.exp(-(beta * delta - margin))), beta * per_token
    probabilities = per_token.exp()
    odds = probabilities / (1 - probabilities)
    return -per_token[:, 0] - beta * torch.log(torch.sigmoid(torch.log(odds[:, 0] / odds[:, 1]))), beta * per_token
