"""GPTQ: its error on the calibration objective is below that of rounding to nearest."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.layers.uniform_quantization import Scheme, quantize
from pipeline.quantization import gptq
from pipeline.quantization.quantized_weights import QuantizedWeights, build
from tests.conversion.test_huggingface_export import InMemory, random_model
from tests.models.small_decoders import CONFIGS


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
    for name in ("bloom", "gemma3"):
        config, scheme = CONFIGS[name], Scheme(4, group=16)
        weights = InMemory(random_model(config))
        tokens = torch.randint(config.vocab_size, (12, 32), generator=torch.Generator().manual_seed(7))
        solved = gptq.solve(build(weights, config), config, tokens, scheme, torch.float32)
        with torch.no_grad():
            expected = build(weights, config)(tokens)
            gaps = [
                float((build(QuantizedWeights(weights, config, scheme, torch.float32, found), config)(tokens) - expected).norm())
                for found in (solved, {})
            ]
        assert gaps[0] < 0.95 * gaps[1]
