"""Linear attention: the chunked delta rule equals the recurrence, a state or the maps of parts continue it, documents are independent."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given as examples
from hypothesis import settings
from hypothesis import strategies as st

from pipeline.layers.attention import Attention, AttentionContext
from pipeline.layers.delta_rule import chunked_delta_rule, delta_rule_of_part, unit_lower_inverse
from pipeline.layers.gated_delta_net import GatedDeltaNet, KimiDeltaAttention
from pipeline.layers.mamba2 import Mamba2
from pipeline.layers.mask import Mask
from pipeline.layers.recurrent import mix
from tests.helpers import one_in

DECAYS = pytest.mark.parametrize("decays", [1, 6], ids=["a decay for each head", "for each row of the state"])


def inputs(length, *, dtype=torch.float32, strength=1.0, decays=1):
    """Queries, keys, values, logarithms of decays (1 or 6 for each head) and betas of 3 heads."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = (torch.randn(2, 3, length, width, generator=generator, dtype=torch.float64) for width in (6, 6, 5))
    decay, beta = (torch.rand(2, 3, length, *more, generator=generator, dtype=torch.float64) for more in ([decays], []))
    given = (F.normalize(q, dim=3), F.normalize(k, dim=3), v, -strength * decay, beta)
    return [x.to(dtype).requires_grad_() for x in given]


def recurrence(q, k, v, log_decay, beta, *, segments=None, state=None):
    """The delta rule as it is written in the paper, one token after the other (equation 10)."""
    memory = v.new_zeros(*v.shape[:2], k.shape[3], v.shape[3]) if state is None else state
    outputs = []
    for t in range(q.shape[2]):
        if segments is not None and t:
            memory = memory * (segments[:, t] == segments[:, t - 1])[:, None, None, None]
        memory = memory * log_decay[:, :, t, :, None].exp()
        key, value = k[:, :, t, :, None], v[:, :, t, None, :]
        memory = memory + beta[:, :, t, None, None] * key @ (value - key.transpose(2, 3) @ memory)
        outputs.append(q[:, :, t, None, :] @ memory)
    return torch.cat(outputs, dim=2), memory


@pytest.mark.parametrize("size", [1, 2, 7, 16, 33, 64])
@pytest.mark.parametrize("keys", ["random", "equal", "opposite"])
@pytest.mark.parametrize("beta", [1, 2])
def test_inverses_in_fp32_are_those_in_fp64(size, keys, beta):
    """The inverse is as small as the system, whose powers are not: with equal keys those of size 64 have elements of up to 1e18."""
    key = torch.randn(3, size, 8, generator=torch.Generator().manual_seed(size))
    sign = 1 - 2 * (torch.arange(size) % 2)[:, None] if keys == "opposite" else 1
    key = F.normalize(key if keys == "random" else sign * key[:, :1].expand_as(key) + 1e-3 * key, dim=2)
    lower = beta * (key @ key.mT).tril(-1)
    exact = torch.linalg.solve_triangular(lower.double(), torch.eye(size).double(), upper=False, unitriangular=True)
    # The last step multiplies by the inverse twice, whose elements are up to beta.
    torch.testing.assert_close(unit_lower_inverse(lower).double(), exact, rtol=0, atol=beta**2 * 1e-6)
    assert torch.autograd.gradcheck(unit_lower_inverse, lower[:1, :7, :7].double().requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("length, chunk", one_in(2, [(150, 64), (7, 64), (33, 8), (64, 64), (1, 64), (20, 1)]))
@pytest.mark.parametrize("strength", [0.1, 30.0], ids=["weak decay", "strong decay"])
@pytest.mark.parametrize("kind", ["alone", "segments", "state", "negative eigenvalues"])
@DECAYS
def test_chunks_equal_the_recurrence(length, chunk, strength, kind, decays):
    """Outputs, the last state, and all gradients, in fp64."""
    given = inputs(length, dtype=torch.float64, strength=strength, decays=decays)
    options = {}
    if kind == "negative eigenvalues":
        given[4] = (2 * given[4].detach()).requires_grad_()
    if kind == "segments":
        starts = torch.rand(2, length, generator=torch.Generator().manual_seed(1)) < 0.1
        options["segments"] = starts.cumsum(dim=1)
    if kind == "state":
        options["state"] = torch.randn(2, 3, 6, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    expected, actual = recurrence(*given, **options), chunked_delta_rule(*given, chunk=chunk, **options)
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) for x in expected]
    wanted, found = (
        torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, pair, strict=True)), given) for pair in (expected, actual)
    )
    torch.testing.assert_close((*actual, *found), (*expected, *wanted), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("largest_beta", [1, 2])
@pytest.mark.parametrize("strength", [0.01, 1.0, 30.0])
@DECAYS
def test_chunks_equal_the_recurrence_in_fp32(largest_beta, strength, decays):
    given = inputs(300, strength=strength, decays=decays)
    given[4] = largest_beta * given[4]
    torch.testing.assert_close(chunked_delta_rule(*given), recurrence(*given), rtol=1e-5, atol=1e-5)


@DECAYS
def test_gradients_of_strong_decays_are_precise_in_fp32(decays):
    """They are small beside those of the products of a token with itself, which no decay changes."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        q, k, v, log_decay, beta = inputs(16, dtype=dtype, decays=decays)
        log_decay = torch.full_like(log_decay, -8.0, requires_grad=True)
        outputs, _ = chunked_delta_rule(q, k, v, log_decay, beta)
        (found[dtype],) = torch.autograd.grad(outputs.square().sum(), log_decay)
    precise = found[torch.float64]
    assert (found[torch.float32] - precise).norm() < 1e-6 * precise.norm()


@DECAYS
def test_decays_after_a_strong_one_are_precise_in_fp32(decays):
    """The sum from the start of a chunk is large, and rounds by more than those of the tokens after the strong decay."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        q, k, v, log_decay, beta = inputs(64, dtype=dtype, decays=decays)
        with torch.no_grad():
            log_decay[..., 1, :] = -500.0
        outputs, _ = chunked_delta_rule(q, k, v, log_decay, beta)
        found[dtype] = (outputs, *torch.autograd.grad(outputs.square().sum(), (q, k, v, log_decay, beta)))
    for rounded, precise in zip(found[torch.float32], found[torch.float64], strict=True):
        assert (rounded - precise).norm() < 1e-6 * precise.norm()


def parts_of(of_part, carry, given, cuts, segments, chunk):
    """The outputs of the parts of a sequence, each computed by `of_part` from its own tokens and the maps of the parts before it."""
    maps, outputs = [], []

    def state_before(transition, state):
        before = torch.zeros_like(state)
        for onward, added in maps:
            before = added + carry(onward, before)
        maps.append((transition, state))
        return before

    for first, end in pairwise([0, *cuts, given[0].shape[2]]):
        options = {} if segments is None else {"segments": segments[:, first:end], "segment_before": segments[:, max(first - 1, 0)]}
        outputs.append(of_part(*(x[:, :, first:end] for x in given), state_before, **options, chunk=chunk))
    return torch.cat(outputs, dim=2)


#: Examples of `assert_parts_equal`: however a sequence is divided.
DIVIDED = {
    "cuts": st.sets(st.integers(1, 69), max_size=7),
    "chunk": st.sampled_from([1, 4, 16, 64]),
    "resets": st.sampled_from([None, 0.02, 0.3]),
}


def assert_parts_equal(whole, of_part, carry, given, cuts, chunk, resets):
    """Outputs and gradients, which reach the parts before through their maps, are those of `whole`."""
    length, segments = given[0].shape[2], None
    if resets is not None:
        segments = (torch.rand(2, length, generator=torch.Generator().manual_seed(1)) < resets).cumsum(dim=1)
    expected = whole(*given, segments=segments)[0]
    actual = parts_of(of_part, carry, given, sorted(cut for cut in cuts if cut < length), segments, chunk)
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    wanted, found = (torch.autograd.grad((weight * x).sum(), given) for x in (expected, actual))
    torch.testing.assert_close((actual, *found), (expected, *wanted), rtol=1e-9, atol=1e-10)


@settings(deadline=None, max_examples=50)
@examples(length=st.integers(1, 70), strength=st.sampled_from([0.01, 1.0, 30.0]), decays=st.sampled_from([1, 6]), **DIVIDED)
def test_parts_equal_the_sequence(length, strength, decays, cuts, chunk, resets):
    given = inputs(length, dtype=torch.float64, strength=strength, decays=decays)
    assert_parts_equal(chunked_delta_rule, delta_rule_of_part, torch.matmul, given, cuts, chunk, resets)


@pytest.mark.parametrize("strength", [0.01, 1.0])
@DECAYS
def test_parts_equal_the_recurrence_in_fp32(strength, decays):
    given = inputs(512, strength=strength, decays=decays)
    parts = parts_of(delta_rule_of_part, torch.matmul, given, range(64, 512, 64), None, 64)
    torch.testing.assert_close(parts, recurrence(*given)[0], rtol=1e-5, atol=1e-5)


def layer(*, key_heads=2, value_heads=4, **options):
    return randomized(GatedDeltaNet(12, key_heads, value_heads, key_dim=5, value_dim=3, kernel=4, **options))


def randomized(made):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7)
    return made


def hidden(length, rows=2):
    return torch.randn(rows, length, 12, generator=torch.Generator().manual_seed(5))


def kimi(*, heads=3):
    return randomized(KimiDeltaAttention(12, heads, 4, kernel=4))


def mamba(*, groups=2):
    return randomized(Mamba2(12, 2 * groups, groups, head_dim=5, state=3, kernel=4, smallest_step=0.1))


@pytest.mark.parametrize("made_of, lengths", [(layer, [1, 2, 60, 70, 17]), (kimi, [1, 2, 60, 70, 17]), (mamba, [1, 2, 110, 120, 17])])
def test_documents_are_independent_of_each_other(made_of, lengths):
    """Each document of a packed row has the outputs and gradients that it has alone, over chunk boundaries and in the convolution."""
    made, x = made_of().double(), hidden(sum(lengths), rows=1).double().requires_grad_()
    documents = torch.arange(5).repeat_interleave(torch.tensor(lengths))[None]
    packed = made(x, None, AttentionContext(Mask(documents=documents)))
    alone = torch.cat([made(part) for part in x.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-10)
    grads = [torch.autograd.grad(y.square().sum(), [x, *made.parameters()]) for y in (packed, alone)]
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-9)
    assert not torch.allclose(packed, made(x), atol=1e-2)


def test_the_backward_pass_keeps_no_decayed_keys_of_chunks():
    """What is saved for decays of rows is at most a tenth more than for one decay of a head; unsaved, it would be several times as much."""
    saved = {}
    for decays in (1, 16):
        q, k, v = (torch.rand(1, 2, 256, 16, requires_grad=True) for _ in range(3))
        log_decay, beta = torch.rand(1, 2, 256, decays, requires_grad=True), torch.rand(1, 2, 256, requires_grad=True)
        kept = {}

        def keep(x, kept=kept):
            kept[x.untyped_storage().data_ptr()] = x  # alive, so that no other one has its address
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            chunked_delta_rule(q, k, v, -log_decay, beta)
        saved[decays] = sum(x.untyped_storage().nbytes() for x in kept.values())
    assert saved[16] < 1.15 * saved[1]


def test_one_document_is_the_sequence():
    made, x = layer().double(), hidden(70).double()
    context = AttentionContext(Mask(documents=torch.zeros(2, 70, dtype=torch.int32)))
    torch.testing.assert_close(made(x, None, context), made(x), rtol=1e-9, atol=1e-10)


def test_negative_eigenvalues_double_beta():
    """A token of beta 2 without decay reverses what the state returns for its key; that is the layer's only difference."""
    doubled, plain, x = layer(negative_eigenvalues=True), layer(), hidden(9)
    betas = {}
    for made in (doubled, plain):
        made.mix = lambda of, qkv, log_decay, beta, mask: (
            betas.update({of.negative_eigenvalues: beta}) or mix(of, qkv, log_decay, beta, mask=mask)
        )
        made(x)
    torch.testing.assert_close(betas[True], 2 * betas[False], rtol=0, atol=0)
    key = F.normalize(torch.randn(1, 1, 1, 5, generator=torch.Generator().manual_seed(0)), dim=3)
    state, one = torch.randn(1, 1, 5, 3, generator=torch.Generator().manual_seed(1)), torch.ones(1, 1, 1)
    _, after = chunked_delta_rule(key, key, torch.zeros(1, 1, 1, 3), 0 * one.unsqueeze(3), 2 * one, state=state)
    torch.testing.assert_close(key @ after, -key @ state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "whole, half",
    [
        (layer(key_heads=2, value_heads=6), layer(key_heads=1, value_heads=3)),
        (kimi(heads=4), kimi(heads=2)),
        (mamba(groups=2), mamba(groups=1)),
    ],
)
def test_heads_of_a_slice_are_those_of_the_layer(whole, half):
    """The rows of whole key heads, or groups, with their value heads are a layer; outputs of the slices add up, as of tensor ranks."""
    whole, half, x = whole.double(), half.double(), hidden(20).double()
    total = torch.zeros_like(x)
    for part in range(2):
        with torch.no_grad():
            for (name, target), source in zip(half.named_parameters(), whole.parameters(), strict=True):
                shared = not isinstance(whole, Mamba2) and ("norm" in name or "down" in name)
                dim = None if shared else 1 if name == "output.weight" else 0
                target.copy_(source if dim is None else source.chunk(2, dim=dim)[part])
        total = total + half(x)
    torch.testing.assert_close(total, whole(x), rtol=1e-9, atol=1e-10)


def test_the_gate_of_attention_scales_each_output():
    """With a gate of weights zero, the output is half that without a gate; it is not applied to queries or keys."""
    torch.manual_seed(0)
    gated, plain = (Attention(12, 4, 2, 6, bias=False, rope="none", gated=gated) for gated in (True, False))
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.normal_()
            gated.get_parameter(name).copy_(parameter)
        gated.gate.weight.zero_()
    x = hidden(9)
    torch.testing.assert_close(gated(x), plain(x) / 2)
    with torch.no_grad():
        gated.gate.weight[:6] = 1e4 * torch.ones(12)  # the first head is on or off, the others are half on
        gated.output.weight[:, 6:] = 0
        plain.output.weight[:, 6:] = 0
    expected = plain(x) * (x.sum(dim=2, keepdim=True) > 0)
    torch.testing.assert_close(gated(x), expected, rtol=1e-3, atol=1e-3)
