"""The learning rate of the plain loop, which has an implementation of its own, is that of the training."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.certification.plain_optimizers import plain_rate
from pipeline.config.optimizer import OptimizerConfig
from pipeline.config.training import TrainingConfig
from pipeline.training.lr_schedule import DECAY_SHAPES, SCHEDULES, learning_rate


@given(
    schedule=st.sampled_from(sorted(SCHEDULES)),
    steps=st.integers(1, 60),
    warmup=st.integers(0, 40),
    ratio=st.floats(0, 1),
    decay=st.integers(0, 60),
    shape=st.sampled_from(sorted(DECAY_SHAPES)),
    ends=st.sets(st.integers(1, 59)),
    last=st.floats(0, 1),
)
def test_the_rates_of_all_steps_are_equal(
    schedule: str, steps: int, warmup: int, ratio: float, decay: int, shape: str, ends: set[int], last: float
) -> None:
    before = sorted(end for end in ends if end < steps)
    decays = {"decay_steps": decay, "decay_shape": shape, "decay_ends": before}
    optimizer = OptimizerConfig(schedule=schedule, warmup_steps=warmup, warmup_ratio=ratio, min_lr_ratio=last, **decays)
    training = TrainingConfig(steps=steps)
    for step in range(steps):
        assert plain_rate(step, optimizer, training) == pytest.approx(learning_rate(step, optimizer, training), rel=1e-9)
