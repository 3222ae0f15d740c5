"""Checks of the bytes that a writer process got."""

from __future__ import annotations

import pytest
import torch

from pipeline.checkpoint.handover import LastUpdate
from pipeline.checkpoint.staged_checks import finite_bits, should_have_changed, word_sum
from pipeline.training.optimizers import EagerAdamW


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


@pytest.mark.parametrize("lr", [1e-2, 1e-4, 1e-6, 1e-8])
def test_an_update_of_adamw_that_changed_a_weight_is_recognized_and_no_other(lr):
    weight = torch.nn.Parameter(torch.randn(2000))
    optimizer = EagerAdamW([weight], lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    for updates in range(1, 8):
        before = weight.detach().clone()
        weight.grad = torch.randn(2000)
        optimizer.step()
        state = [optimizer.state[weight][name].numpy() for name in ("exp_avg", "exp_avg_sq")]
        update = LastUpdate(lr, 0.9, 0.95, 1e-8, updates)
        recognized = should_have_changed(weight.detach().numpy(), *state, update)
        assert recognized or lr < 1e-6, "at such rates most updates are lost in rounding"
        assert not (recognized and torch.equal(before, weight))
        for name in range(0, 2000, 50):
            one = [values[name : name + 1] for values in (weight.detach().numpy(), *state)]
            if should_have_changed(*one, update):
                assert before[name] != weight[name]
