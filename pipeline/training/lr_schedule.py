"""The learning rate of every optimizer update: a linear warm-up, then one of the schedules in SCHEDULES."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from pipeline.config import warmup
from pipeline.config.optimizer import OptimizerConfig
from pipeline.config.training import TrainingConfig

#: Maps (update, optimizer, training) to the share of the way from the peak to the last learning rate, in [0, 1].
Schedule = Callable[[int, OptimizerConfig, TrainingConfig], float]


def linear(update: int, optimizer: OptimizerConfig, training: TrainingConfig) -> float:
    """Linear decay from the end of the warm-up to the last step."""
    return _progress(update, warmup.lr_steps(optimizer, training), training.steps)


def cosine(update: int, optimizer: OptimizerConfig, training: TrainingConfig) -> float:
    """Half a cosine from the end of the warm-up to the last step (Loshchilov & Hutter 2017, https://arxiv.org/abs/1608.03983)."""
    return 0.5 - 0.5 * math.cos(math.pi * linear(update, optimizer, training))


def wsd(update: int, optimizer: OptimizerConfig, training: TrainingConfig) -> float:
    """Warmup-stable-decay: constant, then a decay in the last decay_steps (Hu et al. 2024, https://arxiv.org/abs/2404.06395).

    With decay_ends it is WSD-S: after each of these decays the rate is the peak again (Wen et al. 2024, https://arxiv.org/abs/2410.05192).
    """
    begin, end = next((decay for decay in warmup.decays(optimizer, training) if update < decay[1]), (0, training.steps))
    return DECAY_SHAPES[optimizer.decay_shape](_progress(update, max(warmup.lr_steps(optimizer, training), begin), end))


def constant(update: int, optimizer: OptimizerConfig, training: TrainingConfig) -> float:  # noqa: ARG001 - a Schedule
    """No decay, for a trunk from which runs with a decay are forked."""
    return 0.0


#: optimizer.decay_shape -> the share of the way from the peak to the last learning rate as a function of the progress of a decay, which is
#: that of its updates. sqrt is the 1 - sqrt cooldown of Haegele et al. 2024 (https://arxiv.org/abs/2405.18392).
DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: progress,
    "sqrt": math.sqrt,
    "cosine": lambda progress: 0.5 - 0.5 * math.cos(math.pi * progress),
}

#: optimizer.schedule -> schedule
SCHEDULES: dict[str, Schedule] = {"cosine": cosine, "wsd": wsd, "linear": linear, "constant": constant}


def learning_rate(update: int, optimizer: OptimizerConfig, training: TrainingConfig) -> float:
    """The learning rate of optimizer update `update` (0, 1, ...), from lr to lr * min_lr_ratio after the warm-up."""
    peak, last = optimizer.lr, optimizer.lr * optimizer.min_lr_ratio
    if update < (first := warmup.lr_steps(optimizer, training)):
        return peak * (update + 1) / first
    return peak + (last - peak) * SCHEDULES[optimizer.schedule](update, optimizer, training)


def next_rate(settings: Mapping[str, Any], updates: int) -> float:
    """The learning rate of the next update of a run; after its last update, the rate of that.

    Args:
        settings: the configuration in a checkpoint of the run, as nested dictionaries; an older one may lack keys.
        updates: optimizer updates of the checkpoint.
    """

    def known(kind: type[OptimizerConfig | TrainingConfig], saved: Mapping[str, Any]) -> dict[str, Any]:
        return {field.name: saved[field.name] for field in dataclasses.fields(kind) if field.name in saved}

    optimizer = OptimizerConfig(**known(OptimizerConfig, settings["optimizer"]))
    training = TrainingConfig(**known(TrainingConfig, settings["training"]))
    return learning_rate(min(updates, max(training.steps - 1, 0)), optimizer, training)


def _progress(update: int, first: int, steps: int) -> float:
    """The share of the updates from `first` to `steps` that are done after this update, in [0, 1]."""
    return min(1.0, max(0.0, (update - first + 1) / max(1, steps - first)))
