"""NF4: values, memory, slices, and the product."""

import pytest
import torch

from pipeline.layers.nf4 import BLOCK, LEVELS, NF4Weight, stored_bytes


def random(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))


def test_levels_times_a_scale_are_exact_and_others_are_rounded_to_the_nearest():
    levels = torch.tensor(LEVELS)
    weight = levels.repeat(3, 8) * torch.tensor([[0.0], [0.5], [2.0]])
    found = NF4Weight(weight).dequantize()
    assert torch.equal(found[0], weight[0])
    torch.testing.assert_close(found[2], weight[2], rtol=1e-6, atol=0)
    torch.testing.assert_close(found[1], weight[1], rtol=0.01, atol=0)  # its scale is rounded to 64/255 of the largest one
    weight = random(70, 100)
    found = NF4Weight(weight).dequantize()
    blocks = torch.nn.functional.pad(weight, (0, 28)).unflatten(1, (-1, BLOCK)).abs().amax(2).repeat_interleave(BLOCK, 1)[:, :100]
    widest = (levels[1:] - levels[:-1]).max() / 2
    assert ((found - weight).abs() <= blocks * widest * 1.02).all()
    assert (found - weight).norm() < 0.1 * weight.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantized_weights_are_quantized_to_themselves(dtype):
    """A run that is resumed reads the dequantized weights of its checkpoint."""
    quantized = NF4Weight(random(130, 192).to(dtype))
    again = NF4Weight(quantized.dequantize())
    assert torch.equal(again.codes, quantized.codes)
    assert torch.equal(again.scales, quantized.scales)


def test_memory_is_an_eighth_of_fp32():
    weight = random(512, 512)
    assert NF4Weight(weight).nbytes == weight.numel() * (4 + 8 / 64 + 32 / 4096) / 8
    assert NF4Weight(random(70, 100)).nbytes == stored_bytes(70, 100)


@pytest.mark.parametrize("rows, columns", [(slice(64, 128), slice(None)), (slice(None), slice(128, 192))])
def test_a_slice_of_full_blocks_has_the_values_of_the_full_weight(rows, columns):
    weight = random(192, 256)
    assert torch.equal(NF4Weight(weight[rows, columns]).dequantize(), NF4Weight(weight).dequantize()[rows, columns])


def test_the_product_and_its_gradient_are_those_of_the_dequantized_weight():
    quantized = NF4Weight(random(70, 100))
    x = random(5, 100).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.dtype) or tensor, lambda tensor: tensor):
        y = quantized(x)
    assert torch.float32 not in saved[:2]  # codes and scales
    y.square().sum().backward()
    found, x.grad = x.grad, None
    expected = x @ quantized.dequantize().T
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(found, x.grad)
