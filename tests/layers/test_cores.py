"""The attention cores compared with the reference implementation: PyTorch's kernels, FlexAttention, and partial attention."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.layers import partial_attention
from pipeline.layers.attention import plain, sdpa
from pipeline.layers.attention_kernel import automatic
from pipeline.layers.flex import flex
from pipeline.layers.mask import Mask
from pipeline.layers.position_bias import AlibiSlopes
from tools.gpu.rings import PartialAttention


def partial_core(q, k, v, mask, *, window=None, scale=None):
    """Core that computes attention over two halves of the keys."""
    query_positions, key_positions = (positions.expand(len(q), -1) for positions in mask.token_positions(q.shape[2], k.shape[2], q.device))
    documents = mask.documents if mask.key_documents is None else mask.key_documents
    middle = k.shape[2] // 2
    parts = [
        (
            keys,
            mask.replace(
                positions=query_positions,
                key_positions=key_positions[:, keys],
                key_documents=None if documents is None else documents[:, keys],
                bias=None if mask.bias is None else mask.bias[..., keys],
            ),
        )
        for keys in (slice(0, middle), slice(middle, k.shape[2]))
    ]
    return PartialAttention.apply(q, k, v, parts, window, scale)


CORES = {"sdpa": sdpa, "automatic": automatic, "flex": flex, "partial": partial_core}

CASES = st.fixed_dictionaries(
    {
        "queries": st.integers(2, 9),
        "keys": st.integers(2, 9),
        "cross": st.booleans(),
        "kv_heads": st.sampled_from([1, 2]),
        "groups": st.sampled_from([1, 3]),
        "causal": st.booleans(),
        "window": st.sampled_from([None, 1, 3]),
        "documents": st.sampled_from([None, "some", "padding"]),
        "prefix": st.booleans(),
        "scores": st.sampled_from([None, "slopes", "bias", "softcap"]),
        "scale": st.sampled_from([None, 0.3]),
    }
)
FULLY_MASKED = {"queries": 3, "keys": 4, "cross": True, "kv_heads": 1, "groups": 1, "causal": False}
FULLY_MASKED |= {"window": None, "documents": None, "prefix": False, "scores": None, "scale": None}
CAPPED = {**FULLY_MASKED, "queries": 5, "cross": False, "causal": True, "groups": 3, "documents": "some", "scores": "softcap"}


def drawn(case: dict) -> tuple[list[torch.Tensor], Mask, torch.Tensor]:
    """Return queries, keys and values, the mask, and a gradient of the output."""
    chance = torch.Generator().manual_seed(case["queries"] * 10 + case["keys"])
    heads, queries = case["kv_heads"] * case["groups"], case["queries"]
    keys = case["keys"] if case["cross"] else queries
    shapes = (heads, queries, 8), (case["kv_heads"], keys, 8), (case["kv_heads"], keys, 8)
    inputs = [torch.randn(2, *shape, generator=chance, dtype=torch.float64).requires_grad_() for shape in shapes]
    ids = {count: torch.randint(-1, 2, (2, count), generator=chance).sort(dim=1, descending=True)[0] for count in (queries, keys)}
    documents, key_documents = ids[queries], ids[keys]
    if case["documents"] == "padding":
        key_documents = torch.full_like(key_documents, -1)  # all keys are masked
        documents = None
    causal = case["causal"] and not case["cross"]
    mask = Mask(
        causal=causal,
        documents=documents if case["documents"] and not case["cross"] else None,
        key_documents=key_documents if case["documents"] and case["cross"] else None,
        prefix=torch.tensor([1, 2]) if case["prefix"] and causal else None,
        slopes=AlibiSlopes(heads)() if case["scores"] == "slopes" else None,
        bias=torch.randn(1, heads, queries, keys, generator=chance, dtype=torch.float64) if case["scores"] == "bias" else None,
        softcap=0.7 if case["scores"] == "softcap" else None,
    )
    return inputs, mask, torch.randn(2, heads, queries, 8, generator=chance, dtype=torch.float64)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name == "flex" else ()) for name in CORES])
@settings(deadline=None, max_examples=60)
@given(case=CASES)
@example(case={**FULLY_MASKED, "documents": "padding"})
@example(case={**FULLY_MASKED, "documents": "padding", "scores": "softcap"})
@example(case={**CAPPED, "window": 3})
def test_every_core_equals_the_reference(name, case):
    inputs, mask, grad = drawn(case)
    options = {"window": None if case["cross"] else case["window"], "scale": case["scale"]}
    expected = plain(*inputs, mask, **options)
    if name == "flex":
        inputs = [x.detach() for x in inputs]
    found = CORES[name](*inputs, mask.replace(), **options)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    if name == "flex":
        return  # no backward pass on a CPU
    wanted = torch.autograd.grad(expected, inputs, grad)
    gradients = torch.autograd.grad(found, inputs, grad)
    assert all(gradient.isfinite().all() for gradient in gradients)
    torch.testing.assert_close(gradients, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("core", [plain, *CORES.values()], ids=["plain", *CORES])
def test_fully_masked_queries_get_zeros(core):
    inputs, mask, grad = drawn({**FULLY_MASKED, "documents": "padding"})
    out = core(*([x.detach() for x in inputs] if core is flex else inputs), mask)
    assert (out == 0).all()
    assert core is flex or all((gradient == 0).all() for gradient in torch.autograd.grad(out, inputs, grad))


def test_rows_in_chunks_change_nothing(monkeypatch):
    case = {**FULLY_MASKED, "queries": 7, "cross": False, "causal": True, "window": 3, "documents": "some", "scores": "slopes"}
    inputs, mask, grad = drawn(case)
    expected = partial_core(*inputs, mask, window=3)
    wanted = torch.autograd.grad(expected, inputs, grad)
    monkeypatch.setattr(partial_attention, "MAX_SCORES", 2 * 2 * 3)
    found = partial_core(*inputs, mask.replace(), window=3)
    torch.testing.assert_close((found, *torch.autograd.grad(found, inputs, grad)), (expected, *wanted))


@pytest.mark.parametrize("rules", [{"window": 3}, {}, {"scale": 0.3}], ids=str)
def test_gradcheck_of_partial_attention(rules):
    inputs, mask, _ = drawn({**FULLY_MASKED, "queries": 5, "cross": False, "causal": True, "groups": 3, "documents": "some"})
    for softcap in (None, 0.7):
        capped = mask.replace(softcap=softcap)
        assert torch.autograd.gradcheck(lambda q, k, v, capped=capped: partial_core(q, k, v, capped, **rules), inputs, fast_mode=True)


def test_a_soft_cap_bounds_the_scores():
    """By the formula, c tanh(s / c), with the scores of a few queries written out."""
    inputs, mask, _ = drawn(CAPPED)
    q, k, v = (x.detach() for x in inputs)
    k, v = (x.repeat_interleave(3, dim=1) for x in (k, v))
    scores = 0.7 * torch.tanh(q @ k.transpose(2, 3) / 8**0.5 / 0.7)
    allowed = torch.ones(5, 5, dtype=torch.bool).tril() & (mask.documents[:, None, :, None] == mask.documents[:, None, None, :])
    weights = torch.where(allowed, scores.exp(), 0.0)
    expected = weights / weights.sum(dim=3, keepdim=True) @ v
    for core in (plain, *CORES.values()):
        torch.testing.assert_close(core(*(x.detach() for x in inputs), mask), expected)
