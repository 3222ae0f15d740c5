"""The loss of direct preference optimization (DPO; Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, equation 7)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.layers.batch import Batch
from pipeline.layers.loss import IGNORE

#: Number of the sums that preference_loss returns besides the loss.
PREFERENCE_SUMS = 4


def log_probabilities(head: Callable[..., Tensor], hidden: Tensor, batch: Batch) -> Tensor:
    """Return the log-probabilities of the preferred answer and of the other one in nats, fp32 (batch, 2).

    Args:
        head: an OutputHead; it is applied once for each answer.
        hidden: (batch, sequence or a slice of it, hidden).
        batch: with choices and targets; each row has a pair of answers.
    """
    targets, choices = batch["targets"], batch["choices"]

    def log_probability(row: int, choice: int) -> Tensor:
        chosen = targets[row : row + 1].masked_fill(choices[row : row + 1] != choice, IGNORE)
        return -head(hidden[row : row + 1], chosen, hidden.new_full((1,), chosen.numel(), dtype=torch.float32))

    return torch.stack([log_probability(row, choice) for row in range(len(targets)) for choice in (1, -1)]).view(-1, 2)


def preference_loss(log_probabilities: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the mean loss of the pairs, and rewards.

    The reward of an answer is beta times its log-probability minus that under the reference model.

    Args:
        log_probabilities: (batch, 2).
        batch: with targets and reference; a row without targets is no pair.

    Returns:
        The loss, a 0-dim tensor; and fp32 (4,) without a gradient: the sums over the pairs of the reward of the preferred answer, of that
        of the other one, and of whether the first is larger; and the number of pairs.
    """
    beta, *reference = batch["reference"].unbind(1)
    rewards = beta[:, None] * (log_probabilities - torch.stack(reference, dim=1))
    is_pair = (batch["targets"] != IGNORE).any(dim=1)
    losses = -F.logsigmoid(rewards[:, 0] - rewards[:, 1]) * is_pair
    seen = rewards.detach().float()
    sums = torch.stack([seen[:, 0], seen[:, 1], (seen[:, 0] > seen[:, 1]).float(), torch.ones_like(seen[:, 0])], dim=1)
    loss = losses.mean() * batch["loss_scale"][0] if "loss_scale" in batch else losses.mean()
    return loss, (sums * is_pair[:, None]).sum(dim=0)
