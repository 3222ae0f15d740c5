"""Trains a small decoder under several optimizers and schedules, in one process: what compare_recipes measures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tools.audit import widths

#: model.hidden, sequences of 64 bytes in a batch, and held-out batches of a measurement: the same windows in every run.
WIDTH, SEQUENCES, HELD_OUT = 32, 8, 32
#: A narrow model with an initial standard deviation of 0.02 learns little at first.
INITIAL = "model.init_std=0.1"

#: Tensors of the fragments of a trainer by kind, "weight" and optimizer state, in the order of its fragments.
State = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Recipe:
    """What is trained; the warm-up takes a tenth of the steps.

    Attributes:
        optimizer: optimizer.name.
        lr: optimizer.lr, the peak.
        seed: training.seed: initial weights and the order of the data.
        steps: training.steps.
        more: further settings, key=value.
    """

    optimizer: str
    lr: float
    seed: int
    steps: int
    more: tuple[str, ...] = ("optimizer.schedule=cosine",)

    def words(self) -> list[str]:
        """The settings of the run."""
        common = widths.settings(WIDTH, WIDTH, "standard", self.lr, self.seed, self.steps, SEQUENCES)
        return [*common, f"optimizer={self.optimizer}", "optimizer.min_lr_ratio=0", INITIAL, *self.more]


def train(trainer: Any, config: Any, first: int, last: int) -> float:
    """Make the steps after step `first` up to step `last`; returns the last training loss, infinite once a loss is not finite."""
    loss = torch.zeros(())
    for tokens, batch in islice(widths.batches(config), first, last):
        loss, _ = trainer.train(tokens, batch)
        if not math.isfinite(float(loss)):
            return math.inf
    return float(loss)


def held_out_loss(trainer: Any, held_out: Any) -> float:
    """Return the loss of the held-out text, nats per byte; `held_out` is the configuration whose seed selects its windows."""
    total = count = 0.0
    for tokens, batch in islice(widths.batches(held_out, held_out=True), HELD_OUT):
        losses, targets = trainer.evaluate(tokens, batch)
        total, count = total + float(losses.sum()), count + float(targets.sum())
    return total / count if math.isfinite(total) else math.inf


def state_of(trainer: Any) -> State:
    """Return a copy of weights and optimizer state."""
    return [{kind: values.clone() for kind, values in fragment.tensors.items()} for fragment in trainer.engine.fragments()]


def load(trainer: Any, state: State, updates: int) -> None:
    """Write weights and optimizer state into a trainer, as after so many updates."""
    with torch.no_grad():
        for fragment, values in zip(trainer.engine.fragments(), state, strict=True):
            for kind, tensor in fragment.tensors.items():
                tensor.copy_(values[kind])
    trainer.engine.loaded(updates)


def mean_of(states: Sequence[State]) -> State:
    """Return the mean of the weights of some states; their optimizer state is that of the last."""
    means = []
    for fragments in zip(*states, strict=True):
        mean = torch.stack([fragment["weight"].double() for fragment in fragments]).mean(0).float()
        means.append({**fragments[-1], "weight": mean})
    return means


def paired_test(differences: Iterable[float]) -> tuple[float, float, float]:
    """Test whether paired differences are below 0, one-sided, by Student's t.

    Returns:
        The mean, t, and the probability of a t at least as low if the expected difference is 0.

    Raises:
        ValueError: fewer than two differences, or all are the same.
    """
    values = np.asarray(list(differences), dtype=float)
    if len(values) < 2 or not values.std() > 0:
        raise ValueError(f"a t test requires two or more differences that are not all the same, got {values.tolist()}")
    t = float(values.mean() / (values.std(ddof=1) / math.sqrt(len(values))))
    return float(values.mean()), t, lower_tail(t, len(values) - 1)


def lower_tail(t: float, freedom: int) -> float:
    """Return the probability that Student's t with so many degrees of freedom is below t.

    With t = sqrt(freedom) tan(angle) the density is a multiple of cos(angle) ** (freedom - 1); by the trapezoidal rule.
    """

    def area(last: float) -> float:
        angles = np.linspace(-math.pi / 2, last, 20_001)
        return float(np.trapezoid(np.cos(angles) ** (freedom - 1), angles))

    return area(math.atan(t / math.sqrt(freedom))) / area(math.pi / 2)
