"""Mamba-2: the chunks equal the recurrence, and a state or the maps of parts continue it. The layer: test_gated_delta_net.py."""

import pytest
import torch
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st

from pipeline.layers import state_space
from pipeline.layers.mamba2 import Mamba2
from pipeline.layers.state_space import chunked_state_space, state_space_of_part
from tests.layers.test_gated_delta_net import DIVIDED, assert_parts_equal


def inputs(length, *, dtype=torch.float64, strength=1.0):
    """Queries and keys of 2 groups; values, logarithms of decays and added outputs of 6 heads."""
    generator = torch.Generator().manual_seed(length)
    q, k = (torch.randn(2, 2, length, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    v, skip = (torch.randn(2, 6, length, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    decay = torch.rand(2, 6, length, generator=generator, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, -strength * decay, skip)]


def recurrence(q, k, v, log_decay, skip, *, segments=None, state=None):
    """The recurrence as it is written in the paper, one token after the other (equation 1)."""
    q, k = (x.repeat_interleave(3, dim=1) for x in (q, k))
    memory = v.new_zeros(2, 6, 6, 5) if state is None else state
    outputs = []
    for t in range(q.shape[2]):
        if segments is not None and t:
            memory = memory * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        memory = memory * log_decay[:, :, t, None, None].exp() + k[:, :, t, :, None] * v[:, :, t, None, :]
        outputs.append(q[:, :, t, None, :] @ memory)
    return torch.cat(outputs, dim=2) + skip, memory


@pytest.mark.parametrize("length, chunk", [(1, 128), (7, 128), (150, 128), (33, 4), (20, 1), (130, 2)])
@pytest.mark.parametrize("strength", [0.1, 30.0], ids=["weak decay", "strong decay"])
@pytest.mark.parametrize("kind", ["alone", "segments", "state"])
def test_chunks_equal_the_recurrence(length, chunk, strength, kind, monkeypatch):
    """Outputs, the last state, and all gradients; 130 tokens are 65 chunks, in groups of groups of three."""
    monkeypatch.setattr(state_space, "LEVEL", 3)
    given, options = inputs(length, strength=strength), {}
    if kind == "segments":
        options["segments"] = (torch.rand(2, length, generator=torch.Generator().manual_seed(1)) < 0.1).cumsum(dim=1)
    if kind == "state":
        options["state"] = torch.randn(2, 6, 6, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected, actual = recurrence(*given, **options), chunked_state_space(*given, chunk=chunk, **options)
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) for x in expected]
    wanted, found = (
        torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, pair, strict=True)), given) for pair in (expected, actual)
    )
    torch.testing.assert_close((*actual, *found), (*expected, *wanted), rtol=1e-9, atol=1e-10)


def test_decays_after_a_strong_one_are_precise_in_fp32():
    """The sum from the start of a chunk, and of the chunks, is large, and rounds by more than those of the tokens after it."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        given = inputs(300, dtype=dtype, strength=0.1)
        with torch.no_grad():
            given[3][..., 1] = -500.0
        outputs, _ = chunked_state_space(*given)
        found[dtype] = (outputs, *torch.autograd.grad(outputs.square().sum(), given))
    for rounded, precise in zip(found[torch.float32], found[torch.float64], strict=True):
        assert (rounded - precise).norm() < 1e-6 * precise.norm()


@settings(deadline=None, max_examples=50)
@examples(length=st.integers(1, 70), strength=st.sampled_from([0.01, 1.0, 30.0]), **DIVIDED)
def test_parts_equal_the_sequence(length, strength, cuts, chunk, resets):
    given = inputs(length, strength=strength)
    assert_parts_equal(chunked_state_space, state_space_of_part, Mamba2.carry, given, cuts, chunk, resets)
