"""Checks of the bytes that a writer process got."""

from __future__ import annotations

import pytest
import torch

from pipeline.checkpoint.handover import LastUpdate
from pipeline.checkpoint.staged_checks import STATE_OF_UPDATE, finite_bits, should_have_changed, word_sum
from pipeline.config.optimizer import OptimizerConfig
from pipeline.training import schedule_free
from pipeline.training.elementwise_optimizers import AdEMAMix, EagerAdamW, Lion
from pipeline.training.optimizers import OPTIMIZERS
from pipeline.training.schedule_free import ScheduleFree


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_checks_of_bytes(dtype):
    values = torch.randn(1001).to(dtype)
    data = memoryview(values.view(torch.uint8).numpy())
    size, name = values.element_size(), {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    assert word_sum(data, size) == (word_sum(data[:600], size) + word_sum(data[600:], size)) % 2**32
    assert finite_bits(data, name)
    for bad in (torch.nan, torch.inf, -torch.inf):
        spoiled = values.clone()
        spoiled[77] = bad
        spoiled_data = memoryview(spoiled.view(torch.uint8).numpy())
        assert not finite_bits(spoiled_data, name)
        assert word_sum(spoiled_data, size) != word_sum(data, size)
    largest = torch.full((9,), torch.finfo(dtype).max, dtype=dtype)
    assert finite_bits(memoryview(largest.view(torch.uint8).numpy()), name), "the sum overflows"


def test_the_state_of_every_optimizer_is_known():
    assert {name: kind.state for name, kind in OPTIMIZERS.items()} == STATE_OF_UPDATE


#: Of schedule-free AdamW, for the other numbers of the tests.
FREE = OptimizerConfig(beta2=0.95, warmup_steps=3)
#: Name -> function of a weight and the learning rate that builds the optimizer.
BUILD = {
    "adamw": lambda weight, lr: EagerAdamW([weight], lr=lr, betas=(0.9, 0.95), weight_decay=0.1),
    "ademamix": lambda weight, lr: AdEMAMix([{"params": [weight], "weight_decay": 0.1}], lr, (0.9, 0.95, 0.99), 8.0, 1e-8, 4),
    "lion": lambda weight, lr: Lion([{"params": [weight], "weight_decay": 0.1}], lr, (0.9, 0.95)),
    "schedule_free": lambda weight, lr: ScheduleFree([{"params": [weight], "weight_decay": 0.1}], lr, FREE, 7),
}


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("lr", [1e-2, 1e-4, 1e-6, 1e-8])
def test_an_update_that_changed_a_weight_is_recognized_and_no_other(lr, name):
    weight = torch.nn.Parameter(torch.randn(2000))
    optimizer = BUILD[name](weight, lr)
    for updates in range(1, 8):
        before = weight.detach().clone()
        weight.grad = torch.randn(2000) * (torch.arange(2000) >= 100)  # weights without a gradient only decay
        optimizer.step()
        state = [optimizer.state[weight][kind].numpy() for kind in STATE_OF_UPDATE[name]]
        slow = schedule_free.moved(FREE, 7, updates) if name == "schedule_free" else min(updates / 4, 1.0) * 8.0
        update = LastUpdate(lr, 0.9, 0.95, 1e-8, updates, name, slow)
        recognized = should_have_changed(weight.detach().numpy(), state, update)
        decayed = should_have_changed(weight.detach().numpy()[:100], [values[:100] for values in state], update)
        # The state of schedule-free AdamW has the weight decay; that of the others does not tell it.
        assert not decayed or (name == "schedule_free" and not torch.equal(before[:100], weight[:100]))
        unknown = name == "schedule_free" and updates == 1  # all of the first update is in the average, and none in the state
        assert recognized or unknown or lr < 1e-6, "at such rates most updates are lost in rounding"
        assert not (recognized and torch.equal(before, weight))
        for index in range(0, 2000, 50):
            one, *moments = (values[index : index + 1] for values in (weight.detach().numpy(), *state))
            if should_have_changed(one, moments, update):
                assert before[index] != weight[index]
