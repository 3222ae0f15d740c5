"""The loss of the plain loop: stock cross-entropy of the hidden states that the heads of the model receive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.attention import AttentionContext
from pipeline.layers.batch import Batch
from pipeline.layers.embedding import OutputHead
from pipeline.layers.loss import IGNORE, position_weights
from pipeline.layers.masked_head import NextSentenceHead
from pipeline.layers.multi_token import MultiTokenHead


def reference_loss(model: nn.Module, tokens: Tensor, batch: Batch) -> Tensor:
    """Return the loss of a micro-batch: what the model's own, fused loss should be.

    The mean cross-entropy over the counted targets of the global batch, plus the loss of further tokens (with gradients enabled) and that
    of next sentences (BERT). Of a model without an OutputHead, the loss that the model returns.

    Args:
        model: the plain model.
        tokens: int64 (batch, sequence).
        batch: the other inputs, with targets and loss_scale.
    """
    multi_token = next((module for module in model.modules() if isinstance(module, MultiTokenHead)), None)
    # A model of further tokens computes them with targets only, in a loop of its own.
    left_out = () if multi_token is None else ("targets", "loss_scale")
    inputs = {name: value for name, value in batch.items() if name not in left_out}
    with _arguments_of_heads(model) as calls:
        returned: Tensor = model(tokens, **inputs)
    by_head = dict(calls)
    output = next((head for head in by_head if isinstance(head, OutputHead)), None)
    if output is None:
        return returned
    targets = batch["targets"]
    total = _sum(output(by_head[output][0]), targets, output, batch["loss_scale"]) / targets.numel()
    if multi_token is not None and multi_token.embed is not None and torch.is_grad_enabled():
        hidden, context, *_ = by_head[multi_token]
        total = total + multi_token.factor * _mean_of_further_tokens(multi_token, hidden, context, targets)
    for sentence, (hidden, *_) in by_head.items():
        if isinstance(sentence, NextSentenceHead):
            total = total + _sum(sentence(hidden), batch["next_sentence"]) / len(tokens)
    return total


def _mean_of_further_tokens(head: MultiTokenHead, hidden: Tensor, context: AttentionContext, targets: Tensor) -> Tensor:
    """Return the mean loss of further tokens (DeepSeek-V3, https://arxiv.org/abs/2412.19437, equations 21 to 25).

    Depth k reads token k after the input, predicts the one after it, and has the mean over its own targets in the micro-batch.
    """
    assert head.embed is not None
    total = hidden.new_zeros(())
    for depth, module in enumerate(head.depths, 1):
        hidden = module(head.embed(_shifted(targets, depth - 1).clamp(min=0)), hidden, context)
        labels = _shifted(targets, depth)
        total = total + _sum(head.output(hidden), labels, head.output) / (labels != IGNORE).sum().clamp(min=1)
    return total / len(head.depths)


def _sum(logits: Tensor, targets: Tensor, head: OutputHead | None = None, scale: Tensor | None = None) -> Tensor:
    """Return the summed cross-entropy of logits (..., classes) and targets (...), fp32 or fp64, with the z-loss in the gradient only.

    Args:
        head: has the label smoothing and the weight of the z-loss; None for neither.
        scale: Batch.loss_scale, of all positions or of each; None for 1.
    """
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
    smoothing, z_loss = (0.0, 0.0) if head is None else (head.label_smoothing, head.z_loss)
    losses = F.cross_entropy(precise, targets.flatten(), ignore_index=IGNORE, reduction="none", label_smoothing=smoothing)
    if z_loss:
        squares = (z_loss * precise.logsumexp(dim=1).square()).masked_fill(targets.flatten() == IGNORE, 0.0)
        losses = losses + squares - squares.detach()
    if scale is None:
        return losses.sum()
    return (losses * scale.flatten()).sum() if position_weights(scale) is not None else losses.sum() * scale[0]


def _shifted(targets: Tensor, by: int) -> Tensor:
    """Return the targets `by` positions further; IGNORE if one of the targets between is IGNORE or after the end."""
    shifted = torch.full_like(targets, IGNORE)
    for position in range(targets.shape[1] - by):
        chain = targets[:, position : position + by + 1]
        shifted[:, position] = torch.where((chain == IGNORE).any(dim=1), IGNORE, chain[:, -1])
    return shifted


@contextmanager
def _arguments_of_heads(model: nn.Module) -> Iterator[list[tuple[Any, tuple[Any, ...]]]]:
    """Collect the heads that the model calls, and their arguments: the hidden states, and a context."""
    calls: list[tuple[Any, tuple[Any, ...]]] = []
    hooks = [
        module.register_forward_pre_hook(lambda head, arguments: calls.append((head, arguments)))
        for module in model.modules()
        if isinstance(module, OutputHead | NextSentenceHead | MultiTokenHead)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
