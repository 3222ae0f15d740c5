"""Checks of the bytes that a writer process got."""

from __future__ import annotations

import pytest
import torch

from pipeline.checkpoint.handover import LastUpdate
from pipeline.checkpoint.staged_file import finite_bits, should_have_changed, word_sum
from pipeline.config.optimizer import OPTIMIZERS, OptimizerConfig
from pipeline.training.weight_update import BUILD


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


@pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if kind.matrix_state is None])
@pytest.mark.parametrize("lr", [1e-2, 1e-4, 1e-6, 1e-8])
def test_an_update_that_changed_a_weight_is_recognized_and_no_other(lr, name):
    weight = torch.nn.Parameter(torch.randn(2000))
    config = OptimizerConfig(name=name, beta3=0.99, slow_warmup_steps=4, warmup_steps=3)
    optimizer = BUILD[name]([{"params": [weight], "weight_decay": 0.1}], config, lr, 7)
    for updates in range(1, 8):
        before = weight.detach().clone()
        weight.grad = torch.randn(2000) * (torch.arange(2000) >= 100)  # weights without a gradient only decay
        optimizer.step()
        state = [optimizer.state[weight][kind].numpy() for kind in OPTIMIZERS[name].state]
        update = LastUpdate(lr, updates, config, 7)
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
