"""Learning-rate schedules."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.optimizer import OptimizerConfig
from pipeline.config.training import TrainingConfig
from pipeline.training.lr_schedule import learning_rate
from tests.world import configured


@given(
    steps=st.integers(10, 2000),
    warmup=st.integers(0, 9),
    schedule=st.sampled_from(["cosine", "wsd", "linear"]),
    ratio=st.floats(0, 1),
    decay=st.integers(0, 10),
)
def test_warm_up_reaches_the_peak_and_the_schedule_ends_at_the_minimum(steps, warmup, schedule, ratio, decay):
    optimizer = OptimizerConfig(lr=0.5, warmup_steps=warmup, schedule=schedule, min_lr_ratio=ratio, decay_steps=min(decay, steps - warmup))
    rates = [learning_rate(update, optimizer, TrainingConfig(steps=steps)) for update in range(steps)]
    rising, falling = rates[:warmup], rates[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    if warmup:
        assert rising[-1] == pytest.approx(0.5)
        assert rising[0] == pytest.approx(0.5 / warmup)
    assert falling[-1] == pytest.approx(0.5 * ratio)
    assert all(0.5 * ratio - 1e-12 <= rate <= 0.5 + 1e-12 for rate in falling)


def test_shapes_at_half_way():
    training = TrainingConfig(steps=101)
    half = {
        s: learning_rate(50, OptimizerConfig(lr=1, warmup_steps=1, schedule=s, min_lr_ratio=0), training)
        for s in ("cosine", "linear", "wsd", "constant")
    }
    assert half["cosine"] == pytest.approx(0.5)
    assert half["linear"] == pytest.approx(0.5)
    assert half["wsd"] == half["constant"] == 1
    quarter = learning_rate(25, OptimizerConfig(lr=1, warmup_steps=1, schedule="cosine", min_lr_ratio=0), training)
    assert quarter == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))
    wsd = OptimizerConfig(lr=1, warmup_steps=1, schedule="wsd", min_lr_ratio=0, decay_steps=20)
    assert [learning_rate(u, wsd, training) for u in (80, 81, 90, 100)] == pytest.approx([1, 0.95, 0.5, 0])


def test_the_shapes_of_a_decay():
    training = TrainingConfig(steps=100)
    rates = {}
    for shape in ("linear", "sqrt", "cosine"):
        wsd = OptimizerConfig(lr=1, warmup_steps=0, schedule="wsd", min_lr_ratio=0.2, decay_steps=4, decay_shape=shape)
        rates[shape] = [learning_rate(update, wsd, training) for update in range(95, 100)]
    assert rates["linear"] == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    assert rates["sqrt"] == pytest.approx([1, 0.6, 1 - 0.8 * math.sqrt(0.5), 1 - 0.8 * math.sqrt(0.75), 0.2])
    assert rates["cosine"] == pytest.approx([1, *(0.6 + 0.4 * math.cos(math.pi * part / 4) for part in (1, 2, 3)), 0.2])


def test_each_end_of_several_decays_is_that_of_a_run_of_its_length():
    """WSD-S: after a decay, the rate is the peak again. Without decay_steps, each decay is a tenth of the steps up to its end."""
    several = OptimizerConfig(lr=1, warmup_steps=5, schedule="wsd", min_lr_ratio=0, decay_shape="sqrt", decay_ends=[20, 50])
    one = dataclasses.replace(several, decay_ends=[])
    rates = [learning_rate(update, several, TrainingConfig(steps=100)) for update in range(100)]
    for end, decay in ((20, 2), (50, 5), (100, 10)):
        alone = [learning_rate(update, one, TrainingConfig(steps=end)) for update in range(end)]
        assert rates[end - decay - 2 : end] == alone[end - decay - 2 : end]
        assert rates[end - 1] == 0
        assert rates[end : end + 2] in ([1, 1], [])


def test_a_warmup_ratio_is_a_share_of_the_steps():
    training = TrainingConfig(steps=101)
    share, steps = OptimizerConfig(warmup_steps=0, warmup_ratio=0.03), OptimizerConfig(warmup_steps=4)
    both = OptimizerConfig(warmup_steps=4, warmup_ratio=0.5)
    rates = [[learning_rate(update, optimizer, training) for update in range(101)] for optimizer in (share, steps, both)]
    assert rates[0] == rates[1] == rates[2]


@pytest.mark.parametrize("arguments, lr", [((), 2e-5), (("lora.rank=4",), 2e-4), (("lora.rank=4", "training.objective=dpo"), 1e-5)])
def test_fine_tuning_has_defaults_of_its_own(arguments, lr):
    config = configured("stage=finetune", *arguments)
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.training.steps) == (lr, 0.0, 0)
    assert (config.optimizer.warmup_steps, config.optimizer.warmup_ratio, config.training.global_batch_size) == (0, 0.03, 32)
    given = ("optimizer.lr=0.5", "optimizer.weight_decay=0.2", "training.steps=7")
    config = configured("stage=finetune", *given, *arguments)
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.training.steps) == (0.5, 0.2, 7)
