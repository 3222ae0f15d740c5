"""The backward pass of a decoder block, derived and compared with autograd; this file documents it.

Conventions: x is a matrix (tokens, width), one row per token, as in the code; weights are (output, input), so a linear map is y = x W^T.
`d_x` is the gradient of a scalar loss L with respect to x, of x's own shape: d_x[i, j] = dL / dx[i, j].

Two rules follow from the definition:

- a product C = A B has d_A = d_C B^T and d_B = A^T d_C;
- a value that is used twice gets the sum of both gradients (the residual stream: x + f(x)).

A linear map y = x W^T + b thus has d_x = d_y W, d_W = d_y^T x and d_b = the sum of d_y over tokens.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.layers.attention import Attention, AttentionContext
from pipeline.layers.mlp import MLP, GatedMLP
from pipeline.layers.stack import Block

TOKENS, HIDDEN, HEADS, FFN = 5, 8, 2, 12


def example(*shape: int) -> Tensor:
    """Random numbers with a gradient, the same for the same shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).requires_grad_()


def drawn(module: torch.nn.Module) -> torch.nn.Module:
    """The module in double precision with random weights."""
    chance = torch.Generator().manual_seed(0)
    for parameter in module.double().parameters():
        parameter.data = torch.randn(parameter.shape, generator=chance, dtype=torch.float64) / 2
    return module


def equal(ours: dict[str, Tensor], output: Tensor, inputs: dict[str, Tensor], d_output: Tensor) -> None:
    """Compare with autograd, gradient by gradient."""
    expected = torch.autograd.grad(output, list(inputs.values()), d_output)
    assert ours.keys() == inputs.keys()
    for name, gradient in zip(inputs, expected, strict=True):
        torch.testing.assert_close(ours[name], gradient, rtol=1e-10, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


# --- softmax -------------------------------------------------------------------------------------------------------------------------


def softmax_backward(p: Tensor, d_p: Tensor) -> Tensor:
    """p_i = exp(s_i) / sum_k exp(s_k) has dp_i / ds_j = p_i (delta_ij - p_j), so d_s_j = p_j (d_p_j - sum_i d_p_i p_i)."""
    return p * (d_p - (d_p * p).sum(dim=-1, keepdim=True))


def test_softmax():
    scores, d_p = example(TOKENS, TOKENS), example(TOKENS, TOKENS).detach().flip(0)
    p = scores.softmax(dim=-1)
    equal({"scores": softmax_backward(p.detach(), d_p)}, p, {"scores": scores}, d_p)


def test_softmax_of_masked_scores():
    """Where a score is -inf, p and its gradient are 0: masked queries contribute no gradient to a key."""
    scores, d_p = example(TOKENS, TOKENS), example(TOKENS, TOKENS).detach().flip(0)
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    p = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
    d_scores = softmax_backward(p.detach(), d_p)
    assert (d_scores[hidden] == 0).all()
    equal({"scores": d_scores}, p, {"scores": scores}, d_p)


# --- one head of attention -----------------------------------------------------------------------------------------------------------


@dataclass
class Head:
    """Tensors saved for the backward pass: O = P V with P = softmax(S), S = masked Q K^T / sqrt(head_dim) (Vaswani et al. 2017)."""

    q: Tensor
    k: Tensor
    v: Tensor
    p: Tensor

    @classmethod
    def forward(cls, q: Tensor, k: Tensor, v: Tensor) -> "Head":
        """Causal attention of q, k, v, each (tokens, head_dim)."""
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1)
        scores = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(hidden, -torch.inf)
        return cls(q, k, v, scores.softmax(dim=1))

    @property
    def output(self) -> Tensor:
        """O."""
        return self.p @ self.v

    def backward(self, d_o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """d_q, d_k, d_v.

        The sum in the softmax's backward pass, over keys, is sum_j d_p_ij p_ij = sum_j (d_o_i . v_j) p_ij = d_o_i . o_i: one
        number per query, from the output only. Flash attention and ring attention (layers/partial_attention.py) use it and store no P.
        """
        d_v = self.p.T @ d_o
        d_p = d_o @ self.v.T
        delta = (d_o * self.output).sum(dim=1, keepdim=True)
        d_s = self.p * (d_p - delta)
        assert torch.allclose(d_s, softmax_backward(self.p, d_p))
        scale = 1 / math.sqrt(self.q.shape[1])
        return scale * d_s @ self.k, scale * d_s.T @ self.q, d_v


def test_one_head_of_attention():
    q, k, v, d_o = (example(TOKENS, 4).detach().roll(i, 0).requires_grad_() for i in range(4))
    head = Head.forward(q, k, v)
    ours = dict(zip("qkv", Head(*(t.detach() for t in (q, k, v, head.p))).backward(d_o.detach()), strict=True))
    equal(ours, head.output, {"q": q, "k": k, "v": v}, d_o.detach())


# --- multi-head attention ------------------------------------------------------------------------------------------------------------


def attention_backward(attention: Attention, x: Tensor, d_y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """d_x and the gradients of the weights.

    Q = x W_q^T, K = x W_k^T, V = x W_v^T; heads are slices of their columns; y = [O_1 .. O_h] W_o^T. x is used three times.
    """
    w_q, w_k, w_v, w_o = (getattr(attention, name).weight for name in ("query", "key", "value", "output"))
    q, k, v = (x @ w.T for w in (w_q, w_k, w_v))
    head_dim = attention.head_dim
    heads = [Head.forward(*(t[:, i : i + head_dim] for t in (q, k, v))) for i in range(0, q.shape[1], head_dim)]
    mixed = torch.cat([head.output for head in heads], dim=1)

    d_mixed = d_y @ w_o
    parts = [head.backward(d_o) for head, d_o in zip(heads, d_mixed.split(head_dim, dim=1), strict=True)]
    d_q, d_k, d_v = (torch.cat(columns, dim=1) for columns in zip(*parts, strict=True))
    d_x = d_q @ w_q + d_k @ w_k + d_v @ w_v
    weights = {"query.weight": d_q.T @ x, "key.weight": d_k.T @ x, "value.weight": d_v.T @ x, "output.weight": d_y.T @ mixed}
    return d_x, weights


def test_multi_head_attention():
    attention = drawn(Attention(HIDDEN, HEADS, HEADS, HIDDEN // HEADS, bias=False))
    x, d_y = example(TOKENS, HIDDEN), example(TOKENS, HIDDEN).detach().flip(0)
    with torch.no_grad():
        d_x, weights = attention_backward(attention, x, d_y)
    equal({"x": d_x, **weights}, attention(x[None])[0], {"x": x, **dict(attention.named_parameters())}, d_y)


# --- norms ---------------------------------------------------------------------------------------------------------------------------


def layer_norm_backward(x: Tensor, weight: Tensor, eps: float, d_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """d_x, d_weight, d_bias of y = g * n + b with n = (x - mean(x)) / sigma, over the width d (Ba et al. 2016).

    d_n = g * d_y. Mean and sigma depend on every element of x; their derivatives remove the mean of d_n and its component along n:
    d_x = (d_n - mean(d_n) - n mean(d_n * n)) / sigma. So d_x is orthogonal to shift and scale, to which the norm is invariant.
    """
    sigma = (x.var(dim=1, unbiased=False, keepdim=True) + eps).sqrt()
    n = (x - x.mean(dim=1, keepdim=True)) / sigma
    d_n = d_y * weight
    d_x = (d_n - d_n.mean(dim=1, keepdim=True) - n * (d_n * n).mean(dim=1, keepdim=True)) / sigma
    return d_x, (d_y * n).sum(dim=0), d_y.sum(dim=0)


def test_layer_norm():
    norm = drawn(torch.nn.LayerNorm(HIDDEN, eps=1e-5))
    x, d_y = example(TOKENS, HIDDEN), example(TOKENS, HIDDEN).detach().flip(0)
    with torch.no_grad():
        d_x, d_weight, d_bias = layer_norm_backward(x, norm.weight, norm.eps, d_y)
    assert torch.allclose(d_x.sum(dim=1), torch.zeros(TOKENS, dtype=torch.float64)), "no gradient along a shift"
    equal({"x": d_x, "weight": d_weight, "bias": d_bias}, norm(x), {"x": x, **dict(norm.named_parameters())}, d_y)


def rms_norm_backward(x: Tensor, weight: Tensor, eps: float, d_y: Tensor) -> tuple[Tensor, Tensor]:
    """Layer norm without mean and bias (Zhang & Sennrich 2019): n = x / r with r = sqrt(mean(x^2)), d_x = (d_n - n mean(d_n * n)) / r."""
    r = (x.square().mean(dim=1, keepdim=True) + eps).sqrt()
    n = x / r
    d_n = d_y * weight
    return (d_n - n * (d_n * n).mean(dim=1, keepdim=True)) / r, (d_y * n).sum(dim=0)


def test_rms_norm():
    norm = drawn(torch.nn.RMSNorm(HIDDEN, eps=1e-5))
    x, d_y = example(TOKENS, HIDDEN), example(TOKENS, HIDDEN).detach().flip(0)
    with torch.no_grad():
        d_x, d_weight = rms_norm_backward(x, norm.weight, norm.eps, d_y)
    equal({"x": d_x, "weight": d_weight}, norm(x), {"x": x, **dict(norm.named_parameters())}, d_y)


# --- feed-forward --------------------------------------------------------------------------------------------------------------------


def gelu_derivative(z: Tensor) -> Tensor:
    """gelu(z) = z Phi(z) with the normal distribution Phi, so its derivative is Phi(z) + z phi(z) (Hendrycks & Gimpel 2016)."""
    density = (-z.square() / 2).exp() / math.sqrt(2 * math.pi)
    return (1 + (z / math.sqrt(2)).erf()) / 2 + z * density


def mlp_backward(mlp: MLP, x: Tensor, d_y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """y = a W_down^T with a = gelu(z), z = x W_up^T: d_z = d_a * gelu'(z)."""
    z = x @ mlp.up.weight.T
    d_a = d_y @ mlp.down.weight
    d_z = d_a * gelu_derivative(z)
    return d_z @ mlp.up.weight, {"up.weight": d_z.T @ x, "down.weight": d_y.T @ torch.nn.functional.gelu(z)}


def test_feed_forward():
    mlp = drawn(MLP(HIDDEN, FFN, bias=False, activation="gelu"))
    x, d_y = example(TOKENS, HIDDEN), example(TOKENS, HIDDEN).detach().flip(0)
    with torch.no_grad():
        d_x, weights = mlp_backward(mlp, x, d_y)
    equal({"x": d_x, **weights}, mlp(x), {"x": x, **dict(mlp.named_parameters())}, d_y)


def swiglu_backward(mlp: GatedMLP, x: Tensor, d_y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """y = (silu(g) * u) W_down^T with g = x W_gate^T, u = x W_up^T (Shazeer 2020).

    silu(g) = g s with s = 1 / (1 + exp(-g)) has the derivative s + g s (1 - s).
    In a product, each factor is the derivative with respect to the other.
    """
    gate, up, down = mlp.gate.weight, mlp.up.weight, mlp.down.weight
    g, u = x @ gate.T, x @ up.T
    s = g.sigmoid()
    d_a = d_y @ down
    d_g = d_a * u * (s + g * s * (1 - s))
    d_u = d_a * g * s
    return d_g @ gate + d_u @ up, {"gate.weight": d_g.T @ x, "up.weight": d_u.T @ x, "down.weight": d_y.T @ (g * s * u)}


def test_gated_feed_forward():
    mlp = drawn(GatedMLP(HIDDEN, FFN, bias=False))
    x, d_y = example(TOKENS, HIDDEN), example(TOKENS, HIDDEN).detach().flip(0)
    with torch.no_grad():
        d_x, weights = swiglu_backward(mlp, x, d_y)
    equal({"x": d_x, **weights}, mlp(x), {"x": x, **dict(mlp.named_parameters())}, d_y)


# --- a decoder block -----------------------------------------------------------------------------------------------------------------


def test_a_decoder_block():
    """y = m + mlp(norm_2(m)) with m = x + attention(norm_1(x)): from output to input, adding the gradients of the residual connections."""
    layers = torch.nn.LayerNorm(HIDDEN), Attention(HIDDEN, HEADS, HEADS, HIDDEN // HEADS, bias=False)
    block = drawn(Block(*layers, torch.nn.LayerNorm(HIDDEN), MLP(HIDDEN, FFN, bias=False, activation="gelu")))
    norm_1, attention, norm_2, mlp = block.attention_norm, block.attention, block.mlp_norm, block.mlp
    x, d_y = example(TOKENS, HIDDEN), example(TOKENS, HIDDEN).detach().flip(0)
    with torch.no_grad():
        n_1 = norm_1(x)
        m = x + attention(n_1[None])[0]
        n_2 = norm_2(m)

        d_n_2, d_mlp = mlp_backward(mlp, n_2, d_y)
        d_m, d_weight_2, d_bias_2 = layer_norm_backward(m, norm_2.weight, norm_2.eps, d_n_2)
        d_m = d_m + d_y  # residual connection of the feed-forward
        d_n_1, d_attention = attention_backward(attention, n_1, d_m)
        d_x, d_weight_1, d_bias_1 = layer_norm_backward(x, norm_1.weight, norm_1.eps, d_n_1)
        d_x = d_x + d_m  # residual connection of attention
    ours = {
        "x": d_x,
        "attention_norm.weight": d_weight_1,
        "attention_norm.bias": d_bias_1,
        **{f"attention.{name}": gradient for name, gradient in d_attention.items()},
        "mlp_norm.weight": d_weight_2,
        "mlp_norm.bias": d_bias_2,
        **{f"mlp.{name}": gradient for name, gradient in d_mlp.items()},
    }
    equal(ours, block(x[None], AttentionContext())[0], {"x": x, **dict(block.named_parameters())}, d_y)
