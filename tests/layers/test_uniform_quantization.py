"""Uniform quantization as textbooks define it: error bounds, zero, and values computed by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.layers.uniform_quantization import Scheme, quantize

SCHEMES = st.builds(Scheme, bits=st.sampled_from([4, 8]), symmetric=st.booleans(), group=st.sampled_from([None, 4, 8]))


def test_values_computed_by_hand():
    symmetric = quantize(torch.tensor([[-1.2, 0.0, 0.5, 2.0]]), Scheme(4))  # scale 2 / 7
    assert symmetric.codes.tolist() == [[-4, 0, 2, 7]]
    assert symmetric.scale.item() == pytest.approx(2 / 7)
    affine = quantize(torch.tensor([[-1.0, 0.0, 0.5, 2.0]]), Scheme(4, symmetric=False))  # scale 3 / 15, zero point -8 + 5
    assert affine.codes.tolist() == [[-8, -3, -1, 7]]
    assert (affine.scale.item(), affine.zero_point.item()) == (pytest.approx(0.2), -3)
    assert affine.dequantize().tolist() == [pytest.approx([-1.0, 0.0, 0.4, 2.0])]


@given(scheme=SCHEMES, per_tensor=st.booleans(), seed=st.integers(0, 10**6), factor=st.sampled_from([1e-6, 1.0, 1e4]))
def test_the_error_is_at_most_half_a_step_and_zero_is_exact(scheme, per_tensor, seed, factor):
    scheme = Scheme(scheme.bits, scheme.symmetric, per_tensor=True) if per_tensor else scheme
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 8, generator=generator) * factor
    weight[0], weight[1, ::2], weight[2] = 0.0, 0.0, weight[2].abs()  # a row of zeros, a row without negative weights
    found = quantize(weight, scheme)
    groups = found.scale.shape[1]
    # With an affine scheme, rounding the zero point moves the range by up to half a step, and its ends are clamped.
    bound = (0.5 if scheme.symmetric else 1.0) * found.scale.expand(5, groups).repeat_interleave(8 // groups, dim=1)
    difference = (found.dequantize() - weight).abs()
    assert (difference <= bound * 1.001).all()
    assert (found.dequantize()[weight == 0] == 0).all()
    assert found.codes.min() >= scheme.lowest
    if scheme.symmetric:
        torch.testing.assert_close(quantize(-weight, scheme).codes, -found.codes)


def test_weights_are_rounded_with_the_stored_scale():
    """A scale in bf16 differs from the exact one; the nearest integer is that of the stored scale."""
    weight = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    found = quantize(weight, Scheme(8, group=16), torch.bfloat16)
    assert found.scale.dtype == torch.bfloat16
    inner = (found.codes.abs() < 127).flatten()
    step = found.scale.float().repeat_interleave(16, dim=1).flatten()
    assert ((found.dequantize() - weight).abs().flatten()[inner] <= step[inner] * 0.5001).all()
