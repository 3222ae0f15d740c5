"""The output projection and the cross-entropy in one function that never holds all logits.

Rows of the batch are taken in chunks. For each chunk the forward pass computes logits, loss and, in the same visit, the
gradients of hidden states and weight; the backward pass only scales them. Three matrix products as in the plain form
(logits, input gradient, weight gradient), but fp32 logits for one chunk at a time instead of (batch x sequence, vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Reduce = Callable[[Tensor], Tensor]

#: A target that counts for nothing.
IGNORE = -100


def chunk_rows(hidden: int, vocabulary: int, device: torch.device) -> int:
    """Rows of one chunk.

    On a CPU a chunk's fp32 logits should fit a cache (16 MiB); a GPU wants few, large kernels (256 MiB). But never so few rows
    that adding a chunk's product to the weight's gradient takes as long as the product.
    """
    elements = 1 << 22 if device.type == "cpu" else 1 << 26
    return max(512, hidden // 2, elements // max(1, vocabulary))


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of hidden @ weight.T + bias against targets, with all gradients from one pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        first_token: int,
        smoothing: tuple[float, int],
        reduce_max: Reduce | None,
        reduce_sum: Reduce | None,
    ) -> Tensor:
        rows, vocabulary = hidden.shape[0], weight.shape[0]
        share, entries = smoothing
        wide = torch.promote_types(hidden.dtype, torch.float32)
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight: Tensor | None = None
        grad_bias = None if bias is None else torch.zeros(vocabulary, dtype=wide, device=hidden.device)
        total = torch.zeros((), dtype=wide, device=hidden.device)

        chunk = chunk_rows(hidden.shape[1], vocabulary, hidden.device)
        for start in range(0, rows, chunk):
            part = slice(start, min(start + chunk, rows))
            counted = targets[part] != IGNORE
            local = targets[part] - first_token
            mine = (local >= 0) & (local < vocabulary)
            local = local.clamp(0, vocabulary - 1).unsqueeze(1)

            narrow = F.linear(hidden[part], weight, bias)
            logits = narrow.to(wide)
            largest = logits.amax(dim=1, keepdim=True)
            if reduce_max is not None:
                largest = reduce_max(largest)
            logits -= largest
            target_logit = torch.where(mine, logits.gather(1, local).squeeze(1), 0.0)
            aim = (1 - share) * target_logit if share else target_logit
            if share:
                aim = aim + share / entries * logits.sum(dim=1)
            exponentials = logits.exp_()
            sums = torch.stack([exponentials.sum(dim=1), aim])
            if reduce_sum is not None:
                sums = reduce_sum(sums)
            total += torch.where(counted, sums[0].log() - sums[1], 0.0).sum()

            if wants_hidden or wants_weight:
                # d loss / d logits = softmax - smoothed one-hot, over the mean's row count
                grad_logits = exponentials.mul_(((1.0 / rows) / sums[0]).unsqueeze(1))
                grad_logits.scatter_add_(1, local, torch.where(mine, (share - 1.0) / rows, 0.0).to(wide).unsqueeze(1))
                if share:
                    grad_logits -= share / entries / rows
                grad_logits.masked_fill_(~counted.unsqueeze(1), 0.0)
                if grad_bias is not None:
                    grad_bias += grad_logits.sum(dim=0)
                narrow.copy_(grad_logits)
                if grad_hidden is not None:
                    torch.mm(narrow, weight, out=grad_hidden[part])
                if wants_weight:
                    product = narrow.t() @ hidden[part]
                    grad_weight = product.to(wide) if grad_weight is None else grad_weight.add_(product)

        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return total / rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors)
        return (*scaled, None, None, None, None, None)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    vocabulary: int | None = None,
    first_token: int = 0,
    reduce_max: Reduce | None = None,
    reduce_sum: Reduce | None = None,
) -> Tensor:
    """The sum of the counted targets' losses over the number of all rows, in nats.

    Args:
        hidden: (batch, sequence, hidden), output of the last norm.
        weight: (vocabulary, hidden), or the rows of it that the caller holds.
        targets: (batch, sequence), int64 token ids of the whole vocabulary, IGNORE where there is none.
        bias: (vocabulary,), added to the logits; its rows are the weight's.
        label_smoothing: share of the target that is spread evenly over the vocabulary (Szegedy et al. 2016).
        vocabulary: entries of the whole vocabulary, where the weight holds some of its rows.
        first_token: token id of the weight's first row.
        reduce_max: elementwise maximum over the holders of the other rows; None when there are none.
        reduce_sum: elementwise sum over them. With pieces of the vocabulary (Shoeybi et al. 2019, section 3), the gradient
            of `hidden` is this piece's part; the sum over the pieces is the caller's.

    Returns:
        A 0-dim tensor, fp32 (fp64 for fp64 input).
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    smoothing = (label_smoothing, vocabulary or weight.shape[0])
    loss: Tensor = _LinearCrossEntropy.apply(rows, weight, bias, targets.reshape(-1), first_token, smoothing, reduce_max, reduce_sum)
    return loss


def mean_factor(targets: Tensor, loss_scale: Tensor | None) -> Tensor:
    """What makes a mean over all positions one over the counted targets: of this batch, or as `loss_scale` (see Batch) says."""
    if loss_scale is not None:
        return loss_scale[0]
    return targets.numel() / (targets != IGNORE).sum().clamp(min=1)
