"""Attention over some of the keys, and how results over several sets of keys become one.

With scores S and L = log sum exp(S) over a set of keys, the output over them is O = exp(S - L) V. Two sets together have
L = log(exp(L1) + exp(L2)) and O = exp(L1 - L) O1 + exp(L2 - L) O2 (Milakov & Gimelshein 2018, https://arxiv.org/abs/1805.02867).
The backward pass needs no merging: with L and O of all keys, P = exp(S - L) are the final probabilities, each set gives its own part of
the gradients, and the parts add up (Dao et al. 2022, https://arxiv.org/abs/2205.14135, appendix B).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pipeline.layers.mask import Mask

#: Scores that are held at a time where no kernel does the work (elements).
SCORES = 1 << 26

_ATEN = torch.ops.aten


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, window: int | None = None, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Attention over these keys; arguments as in Core (layers/attention.py).

    Returns:
        The output (batch, heads, queries, value_dim) and L (batch, heads, queries); zeros and -inf for a query that sees none of them.
    """
    if _has_kernel(q, k, v, mask, window):
        causal, (wide_k, wide_v) = mask.causal, _per_query_head(q, k, v)
        if q.is_cuda:
            return _ATEN._scaled_dot_product_flash_attention(q, wide_k, wide_v, 0.0, causal, False, scale=scale)[:2]
        return _ATEN._scaled_dot_product_flash_attention_for_cpu(q, wide_k, wide_v, 0.0, causal, scale=scale)
    outputs, sums = [], []
    for rows, some in _row_chunks(q, k, mask):
        scores = _scores(q[:, :, rows], k, some, window, scale)
        sums.append(scores.logsumexp(dim=3))
        weights = _probabilities(scores, sums[-1]).to(v.dtype)
        outputs.append(_unfold(_fold(weights, v) @ v, q))
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    mask: Mask,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys contribute to the gradients.

    With dO the output's gradient and D = sum(dO * O) over the head's width: dV = P^T dO, dP = dO V^T, dS = P * (dP - D),
    dQ = scale dS K and dK = scale dS^T Q.

    Args:
        grad: of the final output, (batch, heads, queries, value_dim).
        q, k, v, mask, window, scale: as in forward.
        out: the final output, over all sets of keys.
        total: L over all sets of keys.

    Returns:
        Parts of the gradients of q, k and v.
    """
    if _has_kernel(q, k, v, mask, window):
        grads = _kernel_backward(grad, q, *_per_query_head(q, k, v), out, total, mask.causal, scale)
        return grads[0], _sum_of_shared(grads[1], k), _sum_of_shared(grads[2], v)
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    wide = total.dtype
    grads_q, grad_k, grad_v = [], torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
    for rows, some in _row_chunks(q, k, mask):
        part, part_grad = q[:, :, rows], grad[:, :, rows]
        weights = _probabilities(_scores(part, k, some, window, scale), total[:, :, rows])
        folded = _fold(part_grad, v)
        grad_v += _fold(weights.to(v.dtype), v).transpose(2, 3) @ folded
        grad_weights = _unfold(folded @ v.transpose(2, 3), q).to(wide)
        inner = (part_grad.to(wide) * out[:, :, rows].to(wide)).sum(dim=3, keepdim=True)
        grad_scores = _fold((weights * (grad_weights - inner) * factor).to(q.dtype), k)
        grads_q.append(_unfold(grad_scores @ k, q))
        grad_k += grad_scores.transpose(2, 3) @ _fold(part, k)
    return torch.cat(grads_q, dim=2), grad_k, grad_v


def merge(out: Tensor, total: Tensor, more: Tensor, more_total: Tensor) -> tuple[Tensor, Tensor]:
    """The output and L over two sets of keys from those over each; shapes as forward returns them."""
    both = torch.logaddexp(total, more_total)
    safe = both.masked_fill(both == -torch.inf, 0.0)
    return out * (total - safe).exp().unsqueeze(3) + more * (more_total - safe).exp().unsqueeze(3), both


def _has_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Mask, window: int | None) -> bool:
    """Whether PyTorch's flash attention can do it: nothing but causality, one width of heads, on a GPU 16 bits and widths it knows."""
    if mask.has_rules(k.shape[2], window) or mask.slopes is not None or mask.bias is not None or q.shape[3] != v.shape[3]:
        return False
    if mask.causal and q.shape[2] != k.shape[2]:
        return False
    if q.is_cuda:
        return q.dtype in (torch.bfloat16, torch.float16) and q.shape[3] % 8 == 0 and q.shape[3] <= 256
    return q.device.type == "cpu"


def _kernel_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, ...]:
    """Gradients of q, k and v, with a key and value head for every query head."""
    if not q.is_cuda:
        return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, total, 0.0, causal, scale=scale)
    none = torch.empty(0, dtype=torch.int64, device=q.device)  # state of dropout's generator: there is none
    lengths = (None, None, q.shape[2], k.shape[2])
    return _ATEN._scaled_dot_product_flash_attention_backward(grad, q, k, v, out, total, *lengths, 0.0, causal, none, none, scale=scale)


def _row_chunks(q: Tensor, k: Tensor, mask: Mask) -> Iterator[tuple[slice, Mask]]:
    """Rows of queries with the mask towards all keys, so few at a time that their scores fit."""
    batch, heads, queries, _ = q.shape
    step = max(1, SCORES // (batch * heads * k.shape[2]))
    if step >= queries:
        yield slice(0, queries), mask
        return
    own, other = mask.places(queries, k.shape[2], q.device)
    keys = mask.documents if mask.key_documents is None else mask.key_documents
    for start in range(0, queries, step):
        rows = slice(start, min(start + step, queries))
        documents = None if mask.documents is None else mask.documents[:, rows]
        bias = None if mask.bias is None else mask.bias[:, :, rows]
        yield rows, mask.having(documents=documents, key_documents=keys, positions=own[:, rows], key_positions=other, bias=bias)


def _scores(q: Tensor, k: Tensor, mask: Mask, window: int | None, scale: float | None) -> Tensor:
    """(batch, heads, queries, keys), at least fp32, -inf where a query may not look."""
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    scores = _unfold(_fold(q, k) @ k.transpose(2, 3), q).to(torch.promote_types(q.dtype, torch.float32)) * factor
    bias = mask.scores(q.shape[2], k.shape[2], q.device, scores.dtype)
    if bias is not None:
        scores = scores + bias
    seen = mask.visible(q.shape[2], k.shape[2], q.device, window)
    if seen is None and mask.causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    return scores if seen is None else scores.masked_fill(~seen, -torch.inf)


def _probabilities(scores: Tensor, total: Tensor) -> Tensor:
    """exp(S - L), zeros in a row without keys."""
    return (scores - total.masked_fill(total == -torch.inf, 0.0).unsqueeze(3)).exp()


def _fold(x: Tensor, shared: Tensor) -> Tensor:
    """(batch, heads, queries, ...) -> (batch, kv_heads, heads / kv_heads * queries, ...): one product for what shares a key's head."""
    return x.unflatten(1, (shared.shape[1], -1)).flatten(2, 3)


def _unfold(x: Tensor, q: Tensor) -> Tensor:
    """_fold's inverse; q has the query heads."""
    return x.unflatten(2, (q.shape[1] // x.shape[1], -1)).flatten(1, 2)


def _per_query_head(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values once for each query head."""
    times = q.shape[1] // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1))


def _sum_of_shared(grad: Tensor, shared: Tensor) -> Tensor:
    """The gradient of a shared key or value head: the sum over its query heads."""
    return grad if grad.shape == shared.shape else grad.unflatten(1, (shared.shape[1], -1)).sum(dim=2)
