"""Fused linear cross-entropy: the output projection and the loss in one function that never materializes all logits.

Rows of the batch are processed in chunks. For each chunk, the forward pass computes the logits, the loss and the gradients of hidden
states and weight; the backward pass only scales these gradients. It computes the same three matrix products as the unfused form
(logits, input gradient, weight gradient), with fp32 logits of one chunk at a time instead of (batch x sequence, vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeline.layers.teacher import TaughtRows, Teacher

Reduce = Callable[[Tensor], Tensor]

#: Label of positions that do not contribute to the loss.
IGNORE = -100


def chunk_rows(hidden: int, vocabulary: int, device: torch.device) -> int:
    """Return the number of rows per chunk.

    On a CPU the fp32 logits of a chunk should fit in the cache (16 MiB); a GPU needs few, large kernels (256 MiB). The lower bound keeps
    the accumulation into the weight gradient cheaper than the matrix product of a chunk.
    """
    elements = 1 << 22 if device.type == "cpu" else 1 << 26
    return max(512, hidden // 2, elements // max(1, vocabulary))


def _apply(operation: Callable[..., Tensor], values: Tensor, of_rows: Tensor, *, out: Tensor) -> Tensor:
    """Apply an operation of the values and a column, one of them fp32, and write its result in the dtype of `out`, which may be `values`.

    That is one pass over memory on a GPU. A CPU is slow in mixed dtypes: it computes in fp32, and converts before or after.
    """
    if values.device.type != "cpu" or out.dtype == values.dtype:
        return operation(values, of_rows, out=out)
    if out.dtype == of_rows.dtype:
        return operation(out.copy_(values), of_rows, out=out)
    return out.copy_(operation(values, of_rows, out=values))


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of hidden @ weight.T + bias against targets, with all gradients from one pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor | None,
        first_token: int,
        smoothing: tuple[float, int],
        softcap: float | None,
        z_loss: float,
        reduce_max: Reduce | None,
        reduce_sum: Reduce | None,
        teacher: Teacher | None,
        teacher_weight: float,
    ) -> Tensor:
        rows, vocabulary = hidden.shape[0], weight.shape[0]
        label_smoothing, full_vocabulary = smoothing
        compute_dtype = torch.promote_types(hidden.dtype, torch.float32)
        needs_grad_hidden, needs_grad_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_grad_hidden else None
        grad_weight: Tensor | None = None
        grad_bias = None if bias is None else torch.zeros(vocabulary, dtype=compute_dtype, device=hidden.device)
        total = torch.zeros((), dtype=compute_dtype, device=hidden.device)

        chunk = chunk_rows(hidden.shape[1], vocabulary, hidden.device)
        wide: Tensor | None = None  # one buffer for all chunks: a CPU maps new memory more slowly than it computes in it
        for start in range(0, rows, chunk):
            chunk_slice = slice(start, min(start + chunk, rows))
            is_target = targets[chunk_slice] != IGNORE
            local = targets[chunk_slice] - first_token
            is_local = (local >= 0) & (local < vocabulary)
            local = local.clamp(0, vocabulary - 1).unsqueeze(1)

            local_logits = F.linear(hidden[chunk_slice], weight, bias)
            if softcap is not None:
                tangents = local_logits.div_(softcap).tanh_()
                local_logits = tangents * softcap
            largest = local_logits.amax(dim=1, keepdim=True).to(compute_dtype)
            if reduce_max is not None:
                largest = reduce_max(largest)
            if wide is None and local_logits.dtype != compute_dtype:
                wide = torch.empty_like(local_logits, dtype=compute_dtype)
            logits = _apply(torch.sub, local_logits, largest, out=local_logits if wide is None else wide[: len(local)])
            target_logit = torch.where(is_local, logits.gather(1, local).squeeze(1), 0.0)
            target_term = (1 - label_smoothing) * target_logit if label_smoothing else target_logit
            if label_smoothing:
                target_term = target_term + label_smoothing / full_vocabulary * logits.sum(dim=1)
            taught = None if teacher is None else TaughtRows(logits, Teacher(*(part[chunk_slice] for part in teacher)), first_token)
            exponentials = logits.exp_()
            sums = torch.stack([exponentials.sum(dim=1), target_term, *([] if taught is None else taught.sums)])
            if reduce_sum is not None:
                sums = reduce_sum(sums)
            if taught is not None:
                rest = sums[0].clamp(min=torch.finfo(compute_dtype).tiny)
                sums[0] += sums[2]
            losses = torch.where(is_target, sums[0].log() - sums[1], 0.0)
            if taught is not None:
                losses = losses.lerp(torch.where(is_target, taught.divergence(sums[0], rest, sums[3]), 0.0), teacher_weight)
            factor = None if weights is None else torch.where(is_target, weights[chunk_slice], 0.0).to(compute_dtype)
            total += losses.sum() if factor is None else torch.dot(losses, factor)

            if needs_grad_hidden or needs_grad_weight:
                # d sum / d logits = softmax - smoothed one-hot; divided by the number of rows in the backward pass, where fp16 can hold it
                # The gradient replaces the logits in the dtype of the products; rows without a target are divided by infinity.
                divisor = torch.where(is_target, sums[0], torch.inf)
                if z_loss:  # its gradient is the softmax times 2 z log Z
                    divisor = divisor / (1 + 2 * z_loss * (sums[0].log() + largest.squeeze(1)))
                one_hot = torch.where(is_local, 1.0 - label_smoothing, 0.0)
                if factor is not None:
                    divisor, one_hot = divisor / factor, one_hot * factor
                if taught is not None:
                    share = teacher_weight * (is_target.to(compute_dtype) if factor is None else factor)
                    of_tokens, divisor, one_hot = taught.gradients(divisor, rest, share, one_hot * (1 - teacher_weight), local)
                at_target = exponentials.gather(1, local).squeeze(1) / divisor - one_hot
                if label_smoothing:
                    spread = torch.where(is_target, label_smoothing / full_vocabulary, 0.0)
                    spread = spread if factor is None else spread * factor
                    at_target -= spread
                    _apply(torch.sub, exponentials.div_(divisor.unsqueeze(1)), spread.unsqueeze(1), out=local_logits)
                else:
                    _apply(torch.div, exponentials, divisor.unsqueeze(1), out=local_logits)
                local_logits[torch.arange(len(local), device=local.device), local.squeeze(1)] = at_target.to(local_logits.dtype)
                if taught is not None:
                    local_logits.scatter_add_(1, taught.columns, of_tokens.to(local_logits.dtype))
                if softcap is not None:  # times the derivative of the cap, 1 - tanh^2
                    local_logits.mul_(tangents.square_().neg_().add_(1))
                if grad_bias is not None:
                    grad_bias += local_logits.sum(dim=0, dtype=compute_dtype)
                if grad_hidden is not None:
                    torch.mm(local_logits, weight, out=grad_hidden[chunk_slice])
                if needs_grad_weight:
                    product = local_logits.t() @ hidden[chunk_slice]
                    grad_weight = product.to(compute_dtype) if grad_weight is None else grad_weight.add_(product)

        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.rows = rows
        return total / rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        # In place, and the weight takes the result as its .grad: an fp32 copy would be as large as the embedding. A graph that is kept for
        # another backward pass (zbv computes the gradients of inputs and of weights in two) needs the unscaled gradients again.
        kept = torch._C._autograd._get_current_graph_task_keep_graph()
        factors = [None if grad is None else (grad_loss / ctx.rows).to(grad.dtype) for grad in ctx.saved_tensors]
        pairs = zip(ctx.saved_tensors, factors, strict=True)
        scaled = (None if factor is None else grad * factor if kept else grad.mul_(factor) for grad, factor in pairs)
        return (*scaled, *[None] * 10)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    vocabulary: int | None = None,
    first_token: int = 0,
    reduce_max: Reduce | None = None,
    reduce_sum: Reduce | None = None,
    teacher: Teacher | None = None,
    teacher_weight: float = 1.0,
) -> Tensor:
    """Return the summed loss of all targets other than IGNORE, divided by the number of all rows, in nats.

    Args:
        hidden: (batch, sequence, hidden), output of the last norm.
        weight: (vocabulary, hidden), or this rank's rows of it.
        targets: int64 (batch, sequence), token ids of the full vocabulary, IGNORE for none.
        bias: (vocabulary,), added to the logits; the same rows as the weight.
        weights: fp32 (batch, sequence), factor of the loss of each position; None for 1.
        label_smoothing: probability mass of the target that is spread evenly over the vocabulary (Szegedy et al. 2016).
        softcap: bound of the logits, as in Mask (layers/mask.py); None for none.
        z_loss: weight of the square of log Z, where Z is the sum of the exponentials of the logits (Chowdhery et al. 2022, section 5,
            https://arxiv.org/abs/2204.02311). Only the gradients contain it, not the result.
        vocabulary: size of the full vocabulary, if the weight holds only some of its rows.
        first_token: token id of the weight's first row.
        reduce_max: elementwise maximum over the ranks that hold the other rows; None for an unsharded weight.
        reduce_sum: elementwise sum over the same ranks. With a vocabulary-parallel weight (Shoeybi et al. 2019, section 3), the gradient
            of `hidden` is this rank's summand; the caller sums it over the ranks.
        teacher: a loss has the divergence from it (layers/teacher.py) with `teacher_weight`, and the cross-entropy with the rest of 1;
            not with label smoothing.

    Returns:
        A 0-dim tensor, fp32 (fp64 for fp64 input).
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    smoothing = (label_smoothing, vocabulary or weight.shape[0])
    flat = None if weights is None else weights.reshape(-1)
    assert teacher is None or not label_smoothing
    taught = None if teacher is None else Teacher(*(part.flatten(0, 1) for part in teacher))
    options = (first_token, smoothing, softcap, z_loss, reduce_max, reduce_sum, taught, teacher_weight)
    loss: Tensor = _LinearCrossEntropy.apply(rows, weight, bias, targets.reshape(-1), flat, *options)
    return loss


def position_weights(loss_scale: Tensor | None) -> Tensor | None:
    """Return the factor of the loss of each position, (batch, sequence); None if `loss_scale` (see Batch) has none."""
    return loss_scale if loss_scale is not None and loss_scale.dim() == 2 else None


def mean_factor(targets: Tensor, loss_scale: Tensor | None) -> Tensor:
    """Return the factor that turns a mean over all positions into a mean over the targets other than IGNORE.

    It is `loss_scale` (see Batch) if that is passed, else the mean of this batch; 1 if `loss_scale` has position weights, which include it.
    """
    if loss_scale is not None:
        return loss_scale[0] if loss_scale.dim() == 1 else loss_scale.new_ones(())
    return targets.numel() / (targets != IGNORE).sum().clamp(min=1)
