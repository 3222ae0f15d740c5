"""Attention sinks: every core equals a softmax with one more column, whose value is dropped, and so do its gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeline.layers import partial_attention
from pipeline.layers.attention import Attention, plain, sdpa
from pipeline.layers.attention_kernel import automatic
from pipeline.layers.flex import flex
from pipeline.layers.mask import Mask
from pipeline.layers.shifted_attention import ShiftedSparseAttention
from tests.helpers import one_in

BATCH, HEADS, KV_HEADS, TOKENS, WIDTH = 2, 6, 2, 7, 8
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, -1], [0] * 7])
MASKS = {
    "causal": ({}, None),
    "both sides": ({"causal": False}, None),
    "window": ({}, 3),
    "documents": ({"documents": DOCUMENTS}, None),
    "window of documents": ({"documents": DOCUMENTS}, 2),
    "prefix": ({"prefix": torch.tensor([1, 4])}, None),
}


class Merged(torch.autograd.Function):
    """The formulas of ring attention: output and L without the sinks, and then with them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Mask, window: int | None, scale: float | None) -> Tensor:
        out, lse = partial_attention.add_sinks(*partial_attention.forward(q, k, v, mask, window=window, scale=scale), sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.rest = mask, window, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        mask, window, scale = ctx.rest
        grads = partial_attention.backward(grad, *saved, mask, window=window, scale=scale)
        return *grads, partial_attention.sinks_gradient(grad, saved[3], saved[4], sinks), None, None, None


def merged(q, k, v, mask, *, window=None, scale=None, sinks=None):
    return Merged.apply(q, k, v, sinks, mask, window, scale)


def reference(q, k, v, allowed, sinks, scale=WIDTH**-0.5):
    """The formula, written out for an (..., queries, keys) tensor of what is allowed."""
    k, v = (x.repeat_interleave(len(sinks) // x.shape[1], dim=1) for x in (k, v))
    weights = torch.where(allowed, (q @ k.transpose(2, 3) * scale).exp(), 0.0)
    return weights @ v / (weights.sum(dim=3, keepdim=True) + sinks.exp()[:, None, None])


def drawn(tokens=TOKENS) -> tuple[list[Tensor], Tensor]:
    """Queries, keys, values and sinks, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = (BATCH, HEADS, tokens, WIDTH), (BATCH, KV_HEADS, tokens, WIDTH), (BATCH, KV_HEADS, tokens, WIDTH), (HEADS,)
    inputs = [(2 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_() for shape in shapes]
    return inputs, torch.randn(BATCH, HEADS, tokens, WIDTH, generator=generator, dtype=torch.float64)


def allowed_by(mask: Mask, window: int | None) -> Tensor:
    visible = mask.visible(TOKENS, TOKENS, torch.device("cpu"), window)
    if visible is None:
        visible = torch.ones(TOKENS, TOKENS, dtype=torch.bool)
        visible = visible.tril() if mask.causal else visible
    return visible


@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("kind", one_in(2, MASKS))
@pytest.mark.parametrize("core", [plain, sdpa, automatic, flex, merged])
def test_every_core_is_the_formula(core, kind, scale):
    inputs, grad = drawn()
    rules, window = MASKS[kind]
    mask = Mask(**rules)
    q, k, v, sinks = [x.detach() for x in inputs] if core is flex else inputs
    found = core(q, k, v, mask.replace(), window=window, scale=scale, sinks=sinks)
    expected = reference(*inputs[:3], allowed_by(mask, window), inputs[3], *([] if scale is None else [scale]))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    if core is flex:
        return  # no backward pass on a CPU
    wanted = torch.autograd.grad(expected, inputs, grad)
    torch.testing.assert_close(torch.autograd.grad(found, inputs, grad), wanted, rtol=1e-8, atol=1e-9)
    assert wanted[3].abs().min() > 1e-4, "the sinks of all heads matter"


@pytest.mark.parametrize("core", [plain, sdpa, automatic, flex, merged])
def test_queries_without_keys_get_zeros(core):
    inputs, grad = drawn()
    q, k, v, sinks = [x.detach() for x in inputs] if core is flex else inputs
    mask = Mask(causal=False, key_documents=torch.full((BATCH, TOKENS), -1))
    out = core(q, k, v, mask, sinks=sinks)
    assert (out == 0).all()
    assert core is flex or all((gradient == 0).all() for gradient in torch.autograd.grad(out, inputs, grad))


def test_the_half_precision_of_a_layer_is_kept():
    """Of the formula by L, which is fp32."""
    inputs, _ = drawn()
    q, k, v, sinks = (x.detach().bfloat16() for x in inputs)
    exact = plain(*(x.double() for x in (q, k, v)), Mask(), sinks=sinks.double())
    for core in (plain, flex, automatic):
        found = core(q, k, v, Mask(), sinks=sinks)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("plain_heads", [0, 3, 6])
def test_shifted_groups_have_the_sinks_of_their_heads(plain_heads):
    group, tokens = 4, 12
    inputs, grad = drawn(tokens)
    found = ShiftedSparseAttention(plain, group, plain_heads)(*inputs[:3], Mask(), sinks=inputs[3])
    place = torch.arange(tokens)
    same = torch.stack([(place + shift)[:, None] // group == (place + shift)[None] // group for shift in (0, group // 2)])
    heads = torch.cat([same[:1].expand(plain_heads, -1, -1), same[1:].expand(HEADS - plain_heads, -1, -1)])
    expected = reference(*inputs[:3], heads & torch.ones(tokens, tokens, dtype=torch.bool).tril(), inputs[3])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    wanted = torch.autograd.grad(expected, inputs, grad)
    torch.testing.assert_close(torch.autograd.grad(found, inputs, grad), wanted, rtol=1e-8, atol=1e-9)


def test_a_core_without_sinks_is_an_error():
    """It would compute another function in silence."""
    layer = Attention(16, 4, 2, 4, bias=False, sinks=True)
    layer.core = lambda q, k, v, mask, *, window=None, scale=None: plain(q, k, v, mask, window=window, scale=scale)
    with pytest.raises(TypeError, match="sinks"):
        layer(torch.zeros(1, 3, 16))
