"""GPTQ: its error on the calibration objective is below that of rounding; a block at a time, it computes what a full model does."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.layers.uniform_quantization import QuantizedMatrix, Scheme, quantize
from pipeline.quantization import gptq
from pipeline.quantization.blocks import CPU, BlockByBlock
from pipeline.quantization.export import SolvedLayers, perplexity
from pipeline.quantization.quantized_weights import QuantizedWeights
from tests.conversion.test_huggingface_export import InMemory, random_model
from tests.helpers import one_in
from tests.models.small_decoders import CONFIGS
from tests.quantization.built import build, layers_of


def output_error(weight: torch.Tensor, rounded: torch.Tensor, hessian: torch.Tensor) -> float:
    difference = weight - rounded
    return float(((difference @ hessian) * difference).sum())


@settings(max_examples=15)
@given(
    seed=st.integers(0, 10**6),
    scheme=st.builds(Scheme, bits=st.sampled_from([3, 4]), symmetric=st.booleans(), group=st.sampled_from([None, 32, 96])),
    rank=st.sampled_from([8, 150, 400]),
)
def test_the_error_of_outputs_is_below_that_of_rounding_to_nearest(seed, scheme, rank):
    """Correlated inputs, some of them always zero; 192 columns are two blocks of columns, and groups of 96 cross their boundary."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(48, 192, generator=generator)
    inputs = torch.randn(400, rank, generator=generator) @ torch.randn(rank, 192, generator=generator)
    inputs += 0.1 * torch.randn(400, 192, generator=generator)
    inputs[:, 7] = 0.0
    hessian = inputs.t() @ inputs
    found = gptq.solve_layer(weight, hessian, scheme).dequantize()
    nearest = quantize(weight, scheme).dequantize()
    assert output_error(weight, found, hessian) < 0.95 * output_error(weight, nearest, hessian)


def test_a_diagonal_hessian_rounds_to_nearest():
    """Without correlations there is nothing to compensate."""
    weight = torch.randn(8, 160, generator=torch.Generator().manual_seed(0))
    scheme = Scheme(4, symmetric=False, group=32)
    found, nearest = gptq.solve_layer(weight, torch.eye(160), scheme), quantize(weight, scheme)
    assert torch.equal(found.codes, nearest.codes)
    assert torch.equal(found.scale, nearest.scale)


def test_a_model_is_closer_to_the_original_on_its_calibration_tokens():
    """BLOOM: three of our layers are interleaved in a tensor of its class, whose integers are joined."""
    config, scheme = CONFIGS["bloom"], Scheme(4, group=16)
    weights = InMemory(random_model(config))
    tokens = torch.randint(config.vocab_size, (12, 32), generator=torch.Generator().manual_seed(7))
    solved = dict(gptq.solve(BlockByBlock(weights, config), tokens, scheme, torch.float32))
    quantized = [QuantizedWeights(weights, config, scheme, torch.float32, layers) for layers in (solved, {})]
    with torch.no_grad():
        expected, found, nearest = (build(each, config)(tokens) for each in (weights, *quantized))
    assert (found - expected).norm() < 0.95 * (nearest - expected).norm()


def solved_in_memory(weights, config, sequences, scheme):
    """GPTQ with the full model in memory."""
    model, solved = build(weights, config), {}
    layers, context = layers_of(model), model.attention_context({})
    with torch.no_grad():
        hidden = [model.embed(batch) for batch in sequences.split(8)]
        for name, block in model.blocks.items():
            own = {layer: linear for layer, linear in layers.items() if layer.startswith(f"blocks.{name}.")}
            hessians = {layer: gptq.Hessian(linear) for layer, linear in own.items()}
            for x in hidden:
                block(x, context)
            for layer, linear in own.items():
                hessians[layer].remove()
                solved[layer] = gptq.solve_layer(linear.weight, hessians[layer].value, scheme)
                linear.weight.copy_(solved[layer].dequantize())
            hidden = [block(x, context) for x in hidden]
    return solved


@pytest.mark.parametrize("name", one_in(2, ["gemma3", "llama-tied", "bloom", "opt"]))
def test_a_block_at_a_time_all_bits_are_those_of_a_full_model(name, tmp_path):
    """Tied and untied heads, ALiBi, two rotary bases, learned positions; one batch is smaller."""
    config, scheme = CONFIGS[name], Scheme(4, group=16)
    weights = InMemory(random_model(config))
    before = {each: weights.tensor(each) for each in weights.names()}
    tokens = torch.randint(config.vocab_size, (12, 33), generator=torch.Generator().manual_seed(7))
    expected = solved_in_memory(weights, config, tokens[:, :-1], scheme)
    stored = SolvedLayers(tmp_path / "layers")
    for layer, weight in gptq.solve(BlockByBlock(weights, config), tokens[:, :-1], scheme, torch.float32):
        stored.add(layer, weight)
    assert list(stored) == list(expected)
    for layer, weight in expected.items():
        for part in ("codes", "scale", "zero_point"):
            assert torch.equal(getattr(stored[layer], part), getattr(weight, part)), (layer, part)
    assert all(torch.equal(weights.tensor(each), value) for each, value in before.items()), "the checkpoint is not changed"
    with torch.no_grad():
        model = build(weights, config)
        losses = [float(model(batch[:, :-1], targets=batch[:, 1:])) * len(batch) for batch in tokens.split(8)]
    assert perplexity(BlockByBlock(weights, config), tokens, "test") == torch.tensor(sum(losses) / 12, dtype=torch.float64).exp().item()


def test_the_weights_of_one_block_are_in_memory():
    config = CONFIGS["llama-tied"]
    model = BlockByBlock(InMemory(random_model(config)), config)

    def present():
        return {name for name, parameter in model._model.named_parameters() if not parameter.is_meta}

    names = {name for name, _ in model._model.named_parameters()}
    hidden = model.embed(torch.zeros(1, 8, dtype=torch.int64))
    assert not present()
    for name, block in model.blocks():
        model.apply(block, hidden)
        assert present() == {each for each in names if each.startswith(f"{name}.")} != set()
    assert not present()


@pytest.mark.parametrize("name", ["llama-tied", pytest.param("bloom", marks=pytest.mark.long)])
def test_the_device_computes_all_of_it(name, monkeypatch):
    """Every weight, input and Hessian of a block is on the device: operations of the meta device refuse tensors of others."""
    config, scheme, meta = CONFIGS[name], Scheme(4, symmetric=False, group=16), torch.device("meta")
    model, devices, returned = random_model(config), set(), []

    class Watched(gptq.Hessian):
        def _add(self, layer, inputs):
            devices.add((layer.weight.device, inputs[0].device, self.value.device))
            super()._add(layer, inputs)

    def to(self, device, *more, real=torch.Tensor.to):
        """A copy from the device to the CPU, which the meta device does not support, stays there."""
        returned.append(self.shape) if self.is_meta and device == CPU else None
        return self if self.is_meta and device == CPU else real(self, device, *more)

    monkeypatch.setattr(gptq, "Hessian", Watched)
    monkeypatch.setattr(torch.Tensor, "to", to)
    tokens = torch.zeros(12, 32, dtype=torch.int64)
    found = dict(gptq.solve(BlockByBlock(InMemory(model), config, meta), tokens, scheme, torch.float32))
    assert devices == {(meta, meta, meta)}
    assert found.keys() == layers_of(model).keys()
    assert all(isinstance(weight, QuantizedMatrix) and weight.codes.is_meta for weight in found.values())
    hidden = returned.count((8, 32, config.hidden)), returned.count((4, 32, config.hidden))
    assert hidden == (1 + config.layers,) * 2, "each batch after the embedding and after each block"
    assert len(returned) == sum(hidden) + 3 * len(found)
