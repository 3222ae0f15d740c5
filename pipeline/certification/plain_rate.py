"""The learning rate of the plain loop: a second implementation of optimizer.schedule, which the training code does not use."""

from __future__ import annotations

import math

from pipeline.config.optimizer import OptimizerConfig
from pipeline.config.training import TrainingConfig


def plain_rate(step: int, optimizer: OptimizerConfig, training: TrainingConfig) -> float:
    """Return the learning rate of a step, from 0: linear warm-up to optimizer.lr, then the schedule down to its product with min_lr_ratio.

    cosine: half a cosine to the last step (Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983); linear: to the last step; wsd:
    constant, then decay_shape in the last decay_steps, a tenth of the steps if it is 0 (Hu et al. 2024, https://arxiv.org/abs/2404.06395).
    With decay_ends, that up to the first of them and then, from the peak, up to the next (Wen et al. 2024, https://arxiv.org/abs/2410.05192).
    """
    steps, warmup = training.steps, optimizer.warmup_steps or math.ceil(optimizer.warmup_ratio * training.steps)
    if step < warmup:
        return optimizer.lr * (step + 1) / warmup
    if optimizer.schedule == "wsd":
        steps = min(end for end in (*optimizer.decay_ends, steps) if end > step)
    constant = {"constant": steps, "wsd": steps - (optimizer.decay_steps or max(steps // 10, 1))}.get(optimizer.schedule, 0)
    begin = max(warmup, constant)
    left = 1 - (step + 1 - begin) / (steps - begin) if step >= begin else 1.0
    shape = {"wsd": optimizer.decay_shape, "cosine": "cosine"}.get(optimizer.schedule)
    if shape == "cosine":
        left = math.sin(math.pi / 2 * left) ** 2
    elif shape == "sqrt":
        left = 1 - (1 - left) ** 0.5
    return optimizer.lr * (optimizer.min_lr_ratio + (1 - optimizer.min_lr_ratio) * left)
