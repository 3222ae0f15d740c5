"""The segments of documents that flash attention computes in every step of a ring, against the masked formula; all ranks in one process."""

from functools import partial
from itertools import pairwise, product
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.layers import document_attention, document_segments
from pipeline.layers.attention import plain
from pipeline.layers.mask import Mask
from tests.world import Observed
from tools.gpu.rings import DocumentRing, steps

BATCH, HEADS, KV_HEADS, WIDTH = 2, 4, 2, 8

CASES = st.fixed_dictionaries(
    {
        "ranks": st.sampled_from([1, 2, 4]),
        "half": st.integers(1, 9),
        "causal": st.sampled_from([True, True, False]),
        "value_width": st.sampled_from([4, 8]),
        "short": st.sampled_from([1, 2, 3, 5, 128]),
        "ends": st.sampled_from([0.0, 0.03, 0.1, 0.3, 0.7]),
        "padding": st.floats(0, 1),
        "scale": st.sampled_from([None, 0.7]),
        "seed": st.integers(0, 1000),
    }
)


def drawn(case):
    """Queries, keys, values, the gradient of the output, and documents with padding in the second row."""
    chance = torch.Generator().manual_seed(case["seed"])
    tokens = 2 * case["half"] * case["ranks"]
    documents = (torch.rand(BATCH, tokens, generator=chance) < case["ends"]).int().cumsum(1, dtype=torch.int32)
    documents[1, round(case["padding"] * tokens) :] = -1
    shapes = (HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, case["value_width"]), (HEADS, case["value_width"])
    return [torch.randn(BATCH, heads, tokens, width, generator=chance, dtype=torch.float64) for heads, width in shapes], documents


@settings(deadline=None, max_examples=60)
@given(case=CASES)
def test_attention_over_the_segments_of_all_steps_is_attention_within_documents(case):
    (q, k, v, grad), documents = drawn(case)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = plain(*inputs, Mask(causal=case["causal"], documents=documents), scale=case["scale"])
    wanted = torch.autograd.grad(expected, inputs, grad)
    with mock.patch.object(document_segments, "SHORT", case["short"]):
        out = DocumentRing.apply(*inputs, documents, case["ranks"], case["causal"], case["scale"])
        found = torch.autograd.grad(out, inputs, grad)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@settings(deadline=None, max_examples=60)
@given(case=CASES)
def test_the_limits_are_those_of_a_kernel_for_sequences_of_different_lengths(case):
    """They ascend over all tokens; a segment is within one row, and has every pair of its queries and keys visible; long ones have one."""
    _, documents = drawn(case)
    with mock.patch.object(document_segments, "SHORT", case["short"]):
        for rank in range(case["ranks"]):
            for rows, keys, mask, limits in steps(documents, case["ranks"], rank, causal=case["causal"]):
                assert limits.dtype == torch.int32
                counts = len(rows), len(keys)
                assert [(each[0], each[-1]) for each in limits.tolist()] == [(0, BATCH * count) for count in counts]
                computed = torch.zeros(BATCH, *counts, dtype=torch.bool)
                for spans in zip(*map(pairwise, limits.tolist()), strict=True):
                    assert all(start <= stop for start, stop in spans)
                    row_of = [{place // count for place in range(*span)} for span, count in zip(spans, counts, strict=True)]
                    assert all(len(found) <= 1 for found in row_of), "a length is at most that of a row"
                    for query, key in product(*(range(*span) for span in spans)):
                        assert query // counts[0] == key // counts[1]
                        computed[query // counts[0], query % counts[0], key % counts[1]] = True
                same = documents[:, rows, None] == documents[:, None, keys]
                wanted = same if mask.key_documents is not None else same & (same.sum(2, keepdim=True) > case["short"])
                assert torch.equal(computed, wanted)


def test_sixteen_bits_are_merged_in_fp32():
    """Long documents by the flash kernel and short ones by the formula, which accumulate in fp32."""
    chance = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCH, heads, 1024, WIDTH, generator=chance) for heads in (HEADS, KV_HEADS, KV_HEADS))
    documents = (torch.rand(BATCH, 1024, generator=chance) < 0.01).int().cumsum(1, dtype=torch.int32)
    inputs = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found, expected = DocumentRing.apply(*inputs, documents, 2, True, None), plain(*exact, Mask(documents=documents))
    grads = torch.autograd.grad(found.float().square().sum(), inputs), torch.autograd.grad(expected.square().sum(), exact)
    for a, b in ((found, expected), *zip(*grads, strict=True)):
        assert a.dtype == torch.bfloat16
        assert float((a.double() - b).norm() / b.norm()) < 2**-6


@pytest.mark.parametrize("value_width", [16, 8])
def test_contracts_of_the_kernels_for_segments(value_width):
    """On the meta device: (tokens of all rows, heads, width) with rows of stride 1, logsumexp (heads, tokens), int32 limits."""
    tokens, half, dtype = 32, 16, torch.bfloat16
    empty = partial(torch.empty, device="meta")
    q = empty(BATCH, tokens, HEADS, 16, dtype=dtype).transpose(1, 2)[:, :, half:]
    k, v = empty(BATCH, KV_HEADS, tokens, 16 + value_width, dtype=dtype)[:, :, :half].split((16, value_width), dim=3)
    out, grad = (empty(BATCH, HEADS, tokens, value_width, dtype=dtype)[:, :, half:] for _ in range(2))
    lse = empty(BATCH, HEADS, tokens)[:, :, half:]
    documents = empty(BATCH, half, dtype=torch.int32)
    limits = document_segments.shared_segments(documents, documents, causal=True)
    calls = []
    with Observed(lambda operator, args, _: calls.append((operator.name(), args)) if "flash" in operator.name() else None):
        found, found_lse = document_attention.segments_forward("flash", q, k, v, limits, causal=False, scale=None)
        grads = document_attention.segments_backward("flash", grad, q, k, v, out, lse, limits, causal=False, scale=None)
    assert found.shape == out.shape
    assert (found_lse.shape, found_lse.dtype) == (lse.shape, torch.float32)
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    (forward, given), (backward, (passed_grad, *given_back)) = calls
    assert (forward, backward) == ("aten::_flash_attention_forward", "aten::_flash_attention_backward")
    passed_q, passed_k, passed_v, *rest = given
    total = BATCH * half
    assert rest[2:] == [half, half, 0.0, False, False]
    assert given_back[7:11] == [half, half, 0.0, False]
    assert [x.shape for x in (passed_q, passed_k, passed_v)] == [(total, HEADS, 16), (total, KV_HEADS, 16), (total, KV_HEADS, 16)]
    assert [x.shape for x in (*given_back[:3], given_back[3], passed_grad)] == [
        (total, HEADS, 16),
        (total, KV_HEADS, 16),
        (total, KV_HEADS, 16),
        (total, HEADS, 16),
        (total, HEADS, 16),
    ]
    assert all(x.stride(2) == 1 for x in (passed_q, passed_k, passed_v, passed_grad, *given_back[:4]))
    assert given_back[4].shape == (HEADS, total)
    for x in (*rest[:2], *given_back[4:7]):
        assert x.is_contiguous()
    for x in (*rest[:2], *given_back[5:7]):
        assert (x.dtype, x.shape) == (torch.int32, (limits.shape[1],))
