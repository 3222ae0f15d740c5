"""Mamba-2: the chunks equal the recurrence, a state or the maps of parts continue it, documents and groups are independent."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st

from pipeline.layers import state_space
from pipeline.layers.attention import AttentionContext
from pipeline.layers.init import initial_tensor
from pipeline.layers.mamba2 import Mamba2
from pipeline.layers.mask import Mask
from pipeline.layers.recipes import InverseSoftplus
from pipeline.layers.state_space import chunked_state_space, state_space_of_part


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
@examples(
    length=st.integers(1, 70),
    cuts=st.sets(st.integers(1, 69), max_size=7),
    chunk=st.sampled_from([1, 4, 16, 64]),
    strength=st.sampled_from([0.01, 1.0, 30.0]),
    resets=st.sampled_from([None, 0.02, 0.3]),
)
def test_parts_equal_the_sequence(length, cuts, chunk, strength, resets):
    """However a sequence is divided: outputs and gradients, which reach the parts before through their maps."""
    given, segments, maps = inputs(length, strength=strength), None, []
    if resets is not None:
        segments = (torch.rand(2, length, generator=torch.Generator().manual_seed(1)) < resets).cumsum(dim=1)

    def state_before(transition, state):
        before = torch.zeros_like(state)
        for onward, added in maps:
            before = added + Mamba2.carry(onward, before)
        maps.append((transition, state))
        return before

    outputs = []
    for first, end in pairwise([0, *sorted(cut for cut in cuts if cut < length), length]):
        options = {} if segments is None else {"segments": segments[:, first:end], "segment_before": segments[:, max(first - 1, 0)]}
        outputs.append(state_space_of_part(*(x[:, :, first:end] for x in given), state_before, **options, chunk=chunk))
    expected, actual = chunked_state_space(*given, segments=segments)[0], torch.cat(outputs, dim=2)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wanted, found = (torch.autograd.grad((weight * x).sum(), given) for x in (expected, actual))
    torch.testing.assert_close((actual, *found), (expected, *wanted), rtol=1e-9, atol=1e-10)


def layer(*, groups=2):
    made = Mamba2(12, 2 * groups, groups, head_dim=5, state=3, kernel=4, smallest_step=0.1).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.7)
    return made


def hidden(length, rows=2):
    return torch.randn(rows, length, 12, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def test_documents_are_independent_of_each_other():
    """Each document of a packed row has the outputs and gradients that it has alone, over chunk boundaries and in the convolution."""
    made, x = layer(), hidden(250, rows=1).requires_grad_()
    lengths = [1, 2, 110, 120, 17]
    documents = torch.arange(5).repeat_interleave(torch.tensor(lengths))[None]
    packed = made(x, None, AttentionContext(Mask(documents=documents)))
    alone = torch.cat([made(part) for part in x.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-10)
    grads = [torch.autograd.grad(y.square().sum(), [x, *made.parameters()]) for y in (packed, alone)]
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-9)
    assert not torch.allclose(packed, made(x), atol=1e-2)


def test_heads_of_a_slice_are_those_of_the_layer():
    """The rows of whole groups with their heads are a layer; outputs of the slices add up, as under tensor parallelism."""
    whole, x = layer(), hidden(20)
    total = torch.zeros_like(x)
    for part in range(2):
        half = layer(groups=1)
        with torch.no_grad():
            for (name, target), source in zip(half.named_parameters(), whole.parameters(), strict=True):
                target.copy_(source.chunk(2, dim=1 if name == "output.weight" else 0)[part])
        total = total + half(x)
    torch.testing.assert_close(total, whole(x), rtol=1e-9, atol=1e-10)


def test_the_first_steps_are_between_their_bounds():
    """Their logarithms are distributed uniformly."""
    steps = torch.nn.functional.softplus(initial_tensor("decay_bias", (4096,), InverseSoftplus(0.001, 0.1), 0)).log10()
    assert steps.min() > -3.001
    assert steps.max() < -0.999
    assert torch.histc(steps, 4, -3, -1).tolist() == pytest.approx([1024] * 4, abs=100)
