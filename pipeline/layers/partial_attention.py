"""Attention over a subset of the keys, and the merging of results over several subsets (ring attention).

With scores S and L = log sum exp(S) over a set of keys, the output over them is O = exp(S - L) V. The union of two sets has
L = log(exp(L1) + exp(L2)) and O = exp(L1 - L) O1 + exp(L2 - L) O2 (Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867).
The backward pass needs no merging: with L and O over all keys, P = exp(S - L) are the final probabilities, each set contributes a summand
of the gradients, and the summands are added (Dao et al. 2022, https://arxiv.org/abs/2205.14135, appendix B).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pipeline.layers.attention import with_sinks
from pipeline.layers.attention_kernel import PartialKernel, facts_of, pad_values, partial_kernel
from pipeline.layers.mask import Mask

#: Maximum number of elements of the score tensor, if no fused kernel applies; queries are processed in chunks to stay below it.
MAX_SCORES = 1 << 26

_ATEN = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, window: int | None = None, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute attention over these keys; arguments as in Core (layers/attention.py).

    Returns:
        The output (batch, heads, queries, value_dim) and L (batch, heads, queries); zeros and -inf for a query whose keys are all masked.
    """
    kernel = partial_kernel(*facts_of(q, k, v, mask, window))
    if kernel != "unfused":
        return flash_forward(kernel, q, k, v, causal=mask.causal, scale=scale)
    return formula_forward(q, k, v, mask, window=window, scale=scale)


def formula_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, window: int | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `forward` unfused."""
    chunks = [_forward_chunk(q[:, :, rows], k, v, chunk_mask, window, scale) for rows, chunk_mask in _row_chunks(q, k, mask)]
    outputs, lses = zip(*chunks, strict=True)
    return torch.cat(outputs, dim=2), torch.cat(lses, dim=2)


def _forward_chunk(q: Tensor, k: Tensor, v: Tensor, mask: Mask, window: int | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Compute formula_forward of some queries. A function, so that its scores are freed before the next chunk has any."""
    scores = _scores(q, k, mask, window, scale)
    lse = scores.logsumexp(dim=3)
    weights = _probabilities(scores, lse).to(v.dtype)
    return _ungroup_queries(_group_queries(weights, v) @ v, q), lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the contribution of these keys to the gradients.

    With dO the gradient of the output and D = sum(dO * O) over value_dim: dV = P^T dO, dP = dO V^T, dS = P * (dP - D),
    dQ = scale dS K and dK = scale dS^T Q.

    Args:
        grad: gradient of the final output, (batch, heads, queries, value_dim).
        q, k, v, mask, window, scale: as in forward.
        out: the final output, over all sets of keys.
        lse: L over all sets of keys.

    Returns:
        Contributions to the gradients of q, k and v.
    """
    kernel = partial_kernel(*facts_of(q, k, v, mask, window))
    if kernel != "unfused":
        return flash_backward(kernel, grad, q, k, v, out, lse, causal=mask.causal, scale=scale)
    return formula_backward(grad, q, k, v, out, lse, mask, window=window, scale=scale)


def formula_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Mask,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `backward` unfused."""
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    compute_dtype = lse.dtype
    grads_q, grad_k, grad_v = [], torch.zeros_like(k, dtype=compute_dtype), torch.zeros_like(v, dtype=compute_dtype)
    for rows, chunk_mask in _row_chunks(q, k, mask):
        scores = _scores(q[:, :, rows], k, chunk_mask, window, scale)
        weights = _probabilities(scores, lse[:, :, rows])
        factor: float | Tensor = scale
        if mask.softcap is not None:  # times the derivative of the cap, 1 - tanh^2; 0 for masked scores, which are -inf
            factor = scale * (1 - (scores.clamp(min=-mask.softcap) / mask.softcap).square())
        del scores
        grads_q.append(_backward_chunk(weights, grad[:, :, rows], q[:, :, rows], k, v, out[:, :, rows], factor, (grad_k, grad_v)))
        del weights, factor  # before the next chunk has any
    return torch.cat(grads_q, dim=2), grad_k, grad_v


def _backward_chunk(
    weights: Tensor, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, factor: float | Tensor, sums: tuple[Tensor, Tensor]
) -> Tensor:
    """Return the gradient of some queries, and add to those of k and v (`sums`).

    Weights are the probabilities of their scores; the factor is the derivative of these by the products of queries and keys.
    """
    grad_k, grad_v = sums
    grouped_grad = _group_queries(grad, v)
    grad_v += _group_queries(weights.to(v.dtype), v).transpose(2, 3) @ grouped_grad
    grad_weights = _ungroup_queries(grouped_grad @ v.transpose(2, 3), q).to(weights.dtype)
    delta = (grad.to(weights.dtype) * out.to(weights.dtype)).sum(dim=3, keepdim=True)
    grad_scores = _group_queries((weights * (grad_weights - delta) * factor).to(q.dtype), k)
    grad_k += grad_scores.transpose(2, 3) @ _group_queries(q, k)
    return _ungroup_queries(grad_scores @ k, q)


def merge_(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Merge the output and L over another set of keys into `out` and `lse`, in place; shapes as returned by `forward`.

    The share of the other set, exp(other_lse) / (exp(lse) + exp(other_lse)), is a sigmoid; without keys in both, L is -inf and it is 0.
    """
    share = torch.sigmoid(other_lse - lse).nan_to_num(0.0)
    out.lerp_(other.to(out.dtype), share.unsqueeze(3))
    lse.copy_(torch.logaddexp(lse, other_lse))


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and L over all keys and the sink of each head, which is one more key with the score `sinks` and the value zero.

    `backward` of any keys is exact with these: the probabilities are exp(S - L), and D is that of the output.

    Args:
        out: the output over all keys, (batch, heads, queries, value_dim).
        lse: L over all keys, (batch, heads, queries).
        sinks: (heads,).
    """
    return with_sinks(out, lse, sinks), torch.logaddexp(lse, sinks.to(lse.dtype)[:, None].expand_as(lse))


def sinks_gradient(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, (heads,): the sum over the queries of -P D, since the value of a sink is zero (see backward).

    Args:
        grad: gradient of the output, (batch, heads, queries, value_dim).
        out, lse: as returned by add_sinks.
        sinks: (heads,).
    """
    delta = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(dim=3)
    return -((sinks.to(lse.dtype)[:, None] - lse).exp() * delta).sum(dim=(0, 2)).to(sinks.dtype)


def flash_forward(kernel: PartialKernel, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Compute `forward` with flash attention. Its kernels read the key head of each query head, so k and v are not repeated."""
    q, k, padded_v = _unit_stride(q), _unit_stride(k), _unit_stride(pad_values(q, v))
    if kernel == "flash":
        out, lse = _ATEN._scaled_dot_product_flash_attention(q, k, padded_v, 0.0, causal, False, scale=scale)[:2]
    else:
        out, lse = _ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, padded_v, 0.0, causal, scale=scale)
    return out[..., : v.shape[3]], lse


def flash_backward(
    kernel: PartialKernel,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `backward` with flash attention.

    The CUDA kernel reads `lse` without its strides, and `grad` and `out` in the layout (batch, queries, heads, value_dim).
    """
    q, k, padded_v = _unit_stride(q), _unit_stride(k), _unit_stride(pad_values(q, v))
    grad, out, lse = _kernel_layout(pad_values(q, grad)), _kernel_layout(pad_values(q, out)), lse.contiguous()
    if kernel == "flash":
        rng_state = torch.empty(0, dtype=torch.int64, device=q.device)  # RNG state of dropout, unused
        lengths = (None, None, q.shape[2], k.shape[2])
        grads = _ATEN._scaled_dot_product_flash_attention_backward(
            grad, q, k, padded_v, out, lse, *lengths, 0.0, causal, rng_state, rng_state, scale=scale
        )
    else:
        grads = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, padded_v, out, lse, 0.0, causal, scale=scale)
    return grads[0], grads[1], grads[2][..., : v.shape[3]]


def _unit_stride(x: Tensor) -> Tensor:
    """Make the last stride 1."""
    return x if x.stride(3) == 1 else x.contiguous()


def _kernel_layout(x: Tensor) -> Tensor:
    """Return (batch, heads, queries, dim), contiguous as (batch, queries, heads, dim)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _row_chunks(q: Tensor, k: Tensor, mask: Mask) -> Iterator[tuple[slice, Mask]]:
    """Yield slices of the queries and their masks over all keys, such that a slice has at most MAX_SCORES scores."""
    batch, heads, queries, _ = q.shape
    step = max(1, MAX_SCORES // (batch * heads * k.shape[2]))
    if step >= queries:
        yield slice(0, queries), mask
        return
    query_positions, key_positions = mask.token_positions(queries, k.shape[2], q.device)
    key_documents = mask.documents if mask.key_documents is None else mask.key_documents
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        documents = None if mask.documents is None else mask.documents[:, rows]
        bias = None if mask.bias is None else mask.bias[:, :, rows]
        chunk = mask.replace(
            documents=documents, key_documents=key_documents, positions=query_positions[:, rows], key_positions=key_positions, bias=bias
        )
        yield rows, chunk


def _scores(q: Tensor, k: Tensor, mask: Mask, window: int | None, scale: float | None) -> Tensor:
    """Return the scores (batch, heads, queries, keys), at least fp32, -inf at masked keys."""
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    scores = _ungroup_queries(_group_queries(q, k) @ k.transpose(2, 3), q).to(torch.promote_types(q.dtype, torch.float32)) * factor
    scores = mask.changed(scores)
    allowed = mask.visible(q.shape[2], k.shape[2], q.device, window)
    if allowed is None and mask.causal:
        allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(S - L), zeros for a query whose keys are all masked."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(3)).exp()


def _group_queries(x: Tensor, shared: Tensor) -> Tensor:
    """(batch, heads, queries, ...) -> (batch, kv_heads, heads / kv_heads * queries, ...): one matrix product for each key head."""
    return x.unflatten(1, (shared.shape[1], -1)).flatten(2, 3)


def _ungroup_queries(x: Tensor, q: Tensor) -> Tensor:
    """Invert _group_queries; q has the query heads."""
    return x.unflatten(2, (q.shape[1] // x.shape[1], -1)).flatten(1, 2)
