"""The loss of the plain loop: stock cross-entropy of the hidden states that the model's output heads receive."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline.layers.batch import Batch
from pipeline.layers.embedding import OutputHead
from pipeline.layers.loss import IGNORE
from pipeline.layers.masked_head import NextSentenceHead
from pipeline.layers.multi_token import MultiTokenHead


def reference_loss(model: nn.Module, tokens: Tensor, batch: Batch) -> Tensor:
    """Return the loss of a micro-batch: what the model's own, fused loss should be.

    The mean cross-entropy over the counted targets of the global batch; plus that of further tokens over their own targets in the
    micro-batch (DeepSeek-V3, https://arxiv.org/abs/2412.19437, equations 24 and 25), and of next sentences (BERT). Of a model without an
    OutputHead, the loss that the model returns.

    Args:
        model: the plain model.
        tokens: int64 (batch, sequence).
        batch: the other inputs, with targets and loss_scale.
    """
    with _inputs_of_heads(model) as inputs:
        returned: Tensor = model(tokens, **batch)
    tokens_seen = [(head, hidden) for head, hidden in inputs if isinstance(head, OutputHead)]
    if not tokens_seen:
        return returned
    (head, hidden), *further = tokens_seen
    targets = batch["targets"]
    total = _sum(head(hidden), targets, head.label_smoothing) * batch["loss_scale"][0] / targets.numel()
    factor = next((module.factor for module in model.modules() if isinstance(module, MultiTokenHead)), 0.0)
    for depth, (head, hidden) in enumerate(further, 1):
        labels = _shifted(targets, depth)
        total = total + factor / len(further) * _sum(head(hidden), labels) / (labels != IGNORE).sum().clamp(min=1)
    for sentence, hidden in inputs:
        if isinstance(sentence, NextSentenceHead):
            total = total + _sum(sentence(hidden), batch["next_sentence"]) / len(tokens)
    return total


def _sum(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the summed cross-entropy of logits (..., classes) and targets (...), fp32 or fp64."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    classes = precise.shape[-1]
    return F.cross_entropy(
        precise.reshape(-1, classes), targets.flatten(), ignore_index=IGNORE, reduction="sum", label_smoothing=label_smoothing
    )


def _shifted(targets: Tensor, by: int) -> Tensor:
    """Return the targets `by` positions further; IGNORE if one of the targets between is IGNORE or after the end."""
    shifted = torch.full_like(targets, IGNORE)
    for position in range(targets.shape[1] - by):
        chain = targets[:, position : position + by + 1]
        shifted[:, position] = torch.where((chain == IGNORE).any(dim=1), IGNORE, chain[:, -1])
    return shifted


@contextmanager
def _inputs_of_heads(model: nn.Module) -> Iterator[list[tuple[Any, Tensor]]]:
    """Collect the output heads that the model calls, and the hidden states that they receive, in the order of the calls."""
    found: list[tuple[Any, Tensor]] = []
    hooks = [
        module.register_forward_pre_hook(lambda head, args: found.append((head, args[0])))
        for module in model.modules()
        if isinstance(module, OutputHead | NextSentenceHead)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
