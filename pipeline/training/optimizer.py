"""AdamW, which weights decay, and the learning rate of every update."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from pipeline.config.schema import OptimizerConfig, TrainingConfig


def learning_rate(update: int, optimizer: OptimizerConfig, training: TrainingConfig) -> float:
    """The learning rate of optimizer update `update` (0, 1, ...).

    After a linear warm-up: `cosine` falls along half a cosine (Loshchilov & Hutter 2017), `linear` along a line, both to
    lr * min_lr_ratio at the last step; `wsd` stays at the peak and falls along a line in the last decay_steps (Hu et al. 2024).
    """
    peak, last = optimizer.lr, optimizer.lr * optimizer.min_lr_ratio
    if update < optimizer.warmup_steps:
        return peak * (update + 1) / optimizer.warmup_steps
    first = optimizer.warmup_steps
    if optimizer.schedule == "wsd":
        first = max(first, training.steps - (optimizer.decay_steps or max(1, training.steps // 10)))
    share = min(1.0, max(0.0, (update - first + 1) / max(1, training.steps - first)))
    if optimizer.schedule == "cosine":
        share = 0.5 - 0.5 * math.cos(math.pi * share)
    return peak + (last - peak) * share


def decay_groups(parameters: Iterable[Tensor], weight_decay: float) -> list[dict[str, object]]:
    """Two parameter groups: matrices and embeddings decay, vectors (norms, biases) do not."""
    split: dict[bool, list[Tensor]] = {True: [], False: []}
    for parameter in parameters:
        split[parameter.dim() >= 2].append(parameter)
    return [{"params": split[decays], "weight_decay": weight_decay if decays else 0.0} for decays in (True, False) if split[decays]]


def adamw(groups: list[dict[str, object]], config: OptimizerConfig, lr: float | Tensor) -> torch.optim.AdamW:
    """PyTorch's fused AdamW."""
    return torch.optim.AdamW(groups, lr=lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True)
