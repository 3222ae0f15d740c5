"""Quantization-aware training: layouts equal a plain loop, and the model computes what its int8 export computes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.certification.reference import initialize
from pipeline.layers.fake_quantization import FakeQuantizedLinear, fake_quantize_layers
from pipeline.layers.uniform_quantization import Scheme
from pipeline.parallel.parallelize import build_model
from pipeline.quantization.quantized_weights import QuantizedWeights
from tests.conversion.test_huggingface_export import InMemory, random_model
from tests.helpers import one_in
from tests.models.small_decoders import CONFIGS
from tests.quantization.built import build
from tests.training.expected import Trained, train_plain
from tests.training.layouts import MODELS
from tests.world import configured, in_layout, tiny, train_steps, trainer, unsharded

SETTINGS = tiny(*MODELS["llama"].overrides, "training.fake_quantize=int8")
STEPS = 3


@functools.cache
def reference() -> Trained:
    config = configured(*SETTINGS)
    model: nn.Module = build_model(config)
    initialize(model, config.model, config.training.seed)
    return train_plain(config, [MODELS["llama"].batch(config, step) for step in range(STEPS)], model=model)


def train(layout: str) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    config, mine = trainer(*SETTINGS, *in_layout(layout))
    return train_steps(mine, config, MODELS["llama"].batch, STEPS), unsharded(mine)


@pytest.mark.parametrize("layout", one_in(3, ["zero_stage=1 tensor=2", "zero_stage=0 pipeline=2 tensor=2 schedule=zbv", "zero_stage=3"]))
def test_four_ranks_equal_a_plain_loop(world: Any, layout: str) -> None:
    """A row whose slices are on two ranks has one scale. A weight at the middle between two integers may be rounded either way."""
    expected = reference()
    for numbers, weights in world.run(train, layout):
        torch.testing.assert_close(torch.tensor(numbers), torch.tensor([each[:2] for each in expected.numbers]), rtol=1e-5, atol=0)
        gaps = {name: float((value - expected.weights[name]).norm() / expected.weights[name].norm()) for name, value in weights.items()}
        assert max(gaps.values()) < 1e-3, gaps


def test_the_model_computes_the_logits_of_its_int8_export_and_gradients_pass() -> None:
    config = CONFIGS["llama-grouped"]
    model = random_model(config)
    tokens = torch.randint(config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(7))
    exported = build(QuantizedWeights(InMemory(model), config, Scheme(8), torch.float32), config)
    fake_quantize_layers(model)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), exported(tokens), rtol=1e-5, atol=1e-5)
    layer = model.blocks["0"].mlp.up
    assert isinstance(layer, FakeQuantizedLinear)
    x = torch.randn(4, 64)
    layer(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand_as(layer.weight))
