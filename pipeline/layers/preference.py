"""Losses of preferences, from the log-probabilities of two answers: direct preference optimization (DPO) and others of its family."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.layers.batch import Batch
from pipeline.layers.loss import IGNORE

#: Number of the sums that preference_loss returns besides the loss.
PREFERENCE_SUMS = 4
#: Losses that divide the log-probability of an answer by its number of tokens.
_NORMALIZED = ("sigmoid_norm", "ipo", "simpo", "orpo")


@dataclass(frozen=True)
class PreferenceLoss:
    """A loss of the difference m of two scores: those of the preferred answer and of the other one.

    The score of an answer is its log-probability minus that under the reference model, which is 0 for simpo and orpo.

    ============  ========================  =======================================================================================
    sigmoid       -log sigmoid(beta m)      DPO: Rafailov et al. 2023, https://arxiv.org/abs/2305.18290, equation 7
    sigmoid_norm  the same                  of scores per token: Lambert et al. 2024 (Tulu 3), https://arxiv.org/abs/2411.15124
    hinge         max(0, 1 - beta m)        SLiC: Zhao et al. 2023, https://arxiv.org/abs/2305.10425, with the scores of Liu et al. 2023
                                            (RSO), https://arxiv.org/abs/2309.06657, section 3.2
    ipo           (m - 1 / (2 beta))^2      of scores per token, as in TRL: Azar et al. 2023, https://arxiv.org/abs/2310.12036, equation 17
    simpo         -log sigmoid(beta m - g)  of log-probabilities per token: Meng et al. 2024, https://arxiv.org/abs/2405.14734, equation 6
    orpo          -a - beta log sigmoid(d)  a: the log-probability of the preferred answer per token; d: the difference of the log-odds:
                                            Hong et al. 2024, https://arxiv.org/abs/2403.07691, equations 6 and 7
    ============  ========================  =======================================================================================

    Attributes:
        kind: name of the loss.
        beta: its factor.
        margin: g of simpo.
    """

    kind: str = "sigmoid"
    beta: float = 0.1
    margin: float = 0.0

    def scores(self, log_probabilities: Tensor, reference: Tensor, lengths: Tensor) -> Tensor:
        """Return the scores of answers; arguments and result fp32 (pairs, 2). A row without an answer has the length 0."""
        scores = log_probabilities - reference
        return scores / lengths.clamp(min=1) if self.kind in _NORMALIZED else scores

    def losses(self, scores: Tensor) -> Tensor:
        """Return the loss of each pair, (pairs,), from the scores of its answers, (pairs, 2)."""
        margins = scores[:, 0] - scores[:, 1]
        if self.kind == "hinge":
            return (1 - self.beta * margins).relu()
        if self.kind == "ipo":
            return (margins - 1 / (2 * self.beta)).square()
        if self.kind == "orpo":
            odds = scores - _log1mexp(scores)
            return -scores[:, 0] - self.beta * F.logsigmoid(odds[:, 0] - odds[:, 1])
        return -F.logsigmoid(self.beta * margins - (self.margin if self.kind == "simpo" else 0.0))


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


def preference_loss(log_probabilities: Tensor, batch: Batch, loss: PreferenceLoss) -> tuple[Tensor, Tensor]:
    """Return the mean loss of the pairs, and rewards.

    The reward of an answer is beta times its score.

    Args:
        log_probabilities: (batch, 2).
        batch: with targets, choices and reference; a row without targets is no pair.
        loss: of the pairs.

    Returns:
        The loss, a 0-dim tensor; and fp32 (4,) without a gradient: the sums over the pairs of the reward of the preferred answer, of that
        of the other one, and of whether the first is larger; and the number of pairs.
    """
    counted = batch["targets"] != IGNORE
    lengths = torch.stack([(counted & (batch["choices"] == choice)).sum(dim=1) for choice in (1, -1)], dim=1)
    is_pair = counted.any(dim=1)
    scores = loss.scores(log_probabilities, batch["reference"], lengths)
    losses = torch.where(is_pair, loss.losses(scores), 0.0)
    rewards = loss.beta * scores.detach().float()
    sums = torch.stack([rewards[:, 0], rewards[:, 1], (rewards[:, 0] > rewards[:, 1]).float(), torch.ones_like(rewards[:, 0])], dim=1)
    mean = losses.mean() * batch["loss_scale"][0] if "loss_scale" in batch else losses.mean()
    return mean, (sums * is_pair[:, None]).sum(dim=0)


def _log1mexp(x: Tensor) -> Tensor:
    """Return log(1 - exp(x)) for x <= 0 (Maechler 2012, "Accurately computing log(1 - exp(-|a|))"); x is at most -1e-6.

    Each branch gets values that it has a finite gradient for.
    """
    x = x.clamp(max=-1e-6)
    near = x > -math.log(2)
    return torch.where(near, torch.log(-torch.expm1(torch.where(near, x, -1.0))), torch.log1p(-torch.exp(torch.where(near, -1.0, x))))
