"""The loss of direct preference optimization (DPO; Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, equation 7)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.layers.batch import Batch
from pipeline.layers.loss import IGNORE


def preference_loss(head: Callable[..., Tensor], hidden: Tensor, batch: Batch) -> Tensor:
    """Return the mean loss of the pairs of answers, one in each row; without Batch.reference the mean margin.

    The margin is the log-probability of the preferred answer minus that of the other one, in nats.

    Args:
        head: an OutputHead; it is applied once for each answer.
        hidden: (batch, sequence or a slice of it, hidden).
        batch: with choices and targets.
    """
    targets, choices = batch["targets"], batch["choices"]

    def negative_log_probability(row: int, choice: int) -> Tensor:
        chosen = targets[row : row + 1].masked_fill(choices[row : row + 1] != choice, IGNORE)
        return head(hidden[row : row + 1], chosen, hidden.new_full((1,), chosen.numel(), dtype=torch.float32))

    margins = torch.stack([negative_log_probability(row, -1) - negative_log_probability(row, 1) for row in range(len(targets))])
    if "reference" not in batch:
        return margins.mean()
    beta, reference = batch["reference"].unbind(1)
    losses = -F.logsigmoid(beta * (margins - reference))
    losses = losses * (targets != IGNORE).any(dim=1)
    return losses.mean() * batch["loss_scale"][0] if "loss_scale" in batch else losses.mean()
