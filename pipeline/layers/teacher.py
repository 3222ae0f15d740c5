"""Distillation: the divergence of a model from a teacher, of which the most probable next tokens of each position are known.

The teacher's distribution p has k + 1 outcomes: k tokens, and all others together. With the model's distribution q of these outcomes, a
position has the loss KL(p || q) = sum_i p_i (log p_i - log q_i). How a model divides the last outcome among its tokens is left to the
cross-entropy. If p were normalized over the k tokens instead, the model would learn that all others have the probability 0 (Anshumann et
al. 2025, https://arxiv.org/abs/2503.16870, section 3).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.layers.batch import Batch


class Teacher(NamedTuple):
    """What a teacher predicts.

    Attributes:
        tokens: int (batch, sequence, k), distinct ids.
        log_probabilities: (batch, sequence, k + 1) in nats, of these tokens and of all others together; they are normalized.
    """

    tokens: Tensor
    log_probabilities: Tensor


def teacher_of(batch: Batch) -> Teacher | None:
    """Return the teacher of a batch, None if it has none."""
    return Teacher(batch["teacher_tokens"], batch["teacher_log_probabilities"]) if "teacher_tokens" in batch else None


class TaughtRows:
    """The outcomes of a teacher among the logits of a chunk of rows, of which a rank may hold some columns.

    Args:
        logits: (rows, columns), less the largest logit of each row. Those of the teacher's tokens become -inf.
        teacher: (rows, k) and (rows, k + 1).
        first_token: token id of the first column.

    Attributes:
        sums: (2, rows), to be added over the ranks: the sum of the exponentials of the teacher's tokens, and of their logits times p.
    """

    def __init__(self, logits: Tensor, teacher: Teacher, first_token: int) -> None:
        columns = teacher.tokens.long() - first_token
        self._is_local = (columns >= 0) & (columns < logits.shape[1])
        self.columns = columns.clamp(0, logits.shape[1] - 1)
        self._shares = teacher.log_probabilities.to(logits.dtype).softmax(dim=1)
        taken = logits.gather(1, self.columns)
        self._exponentials = torch.where(self._is_local, taken.exp(), 0.0)
        products = torch.where(self._is_local, self._shares[:, :-1] * taken, 0.0)
        self.sums = torch.stack([self._exponentials.sum(dim=1), products.sum(dim=1)])
        # A token of another rank stands at some column, and leaves its logit as it is.
        logits.scatter_reduce_(1, self.columns, torch.where(self._is_local, -torch.inf, taken), "amin")

    def divergence(self, total: Tensor, rest: Tensor, products: Tensor) -> Tensor:
        """Return KL(p || q) of each row; arguments and result (rows,).

        Args:
            total: sum of the exponentials of all logits.
            rest: that of all but the teacher's tokens.
            products: sum of the logits of the teacher's tokens times p.
        """
        entropy = torch.xlogy(self._shares, self._shares).sum(dim=1)
        return entropy + total.log() - products - torch.xlogy(self._shares[:, -1], rest)

    def gradients(self, divisor: Tensor, rest: Tensor, weights: Tensor, one_hot: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parts of the gradient of the loss, e / divisor - one_hot without a teacher, where e are the exponentials.

        Args:
            divisor: (rows,)
            rest: as in divergence.
            weights: (rows,) factor of the divergence.
            one_hot: (rows,) what is subtracted at the target.
            target: (rows, 1) its column.

        Returns:
            The gradient of the teacher's tokens, (rows, k), 0 for those of other ranks; the divisor of all others; and their one_hot.
        """
        shares = self._shares * weights.unsqueeze(1)
        is_target = self._is_local & (self.columns == target)
        gradient = self._exponentials / divisor.unsqueeze(1) - shares[:, :-1] - torch.where(is_target, one_hot.unsqueeze(1), 0.0)
        return (
            torch.where(self._is_local, gradient, 0.0),
            1 / (1 / divisor - shares[:, -1] / rest),
            one_hot.masked_fill(is_target.any(dim=1), 0.0),
        )


def top_log_probabilities(logits: Tensor, k: int) -> Tensor:
    """Return the k most probable tokens, with the log-probabilities of these and of all others together.

    Args:
        logits: (..., vocabulary).

    Returns:
        fp32 (..., 2 k + 1): k token ids, which fp32 holds up to 2**24, from the most probable; and k + 1 log-probabilities in nats.
    """
    logits = logits.float()
    total = logits.logsumexp(dim=-1, keepdim=True)
    largest, tokens = logits.topk(k, dim=-1)
    rest = logits.scatter(-1, tokens, -torch.inf).logsumexp(dim=-1, keepdim=True)
    return torch.cat([tokens.float(), largest - total, rest - total], dim=-1)
