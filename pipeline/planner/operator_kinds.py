"""What an operator of PyTorch does on a device: nothing, a matrix product, attention, or a memory-bound kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipeline.layers.fp8_products import ALIGNMENT
from pipeline.planner.operations import AttentionCall, Phase, Product

_ATEN = torch.ops.aten
_WITH_SUMMAND = {_ATEN.addmm.default, _ATEN.addmm.out, _ATEN.baddbmm.default, _ATEN.addmm_.default, _ATEN.baddbmm_.default}
_GROUPED = {_ATEN._grouped_mm.default, _ATEN._scaled_grouped_mm.default}
#: Operators that are matrix products.
PRODUCTS = {_ATEN.mm.default, _ATEN.mm.out, _ATEN.bmm.default, _ATEN.bmm.out, _ATEN._scaled_mm.default} | _WITH_SUMMAND | _GROUPED
#: Operators that move no data, besides views.
_FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "wait_tensor", "promote_types"}
#: Operators whose result shares the storage of their input; on the meta device it may have its own.
ALIASES = {"_unsafe_view", "_reshape_alias", "wait_tensor"}
#: Operators that read only the selected rows of their first input.
LOOKUPS = {"embedding", "index_select", "gather", "index"}


def short_name(operator: Any) -> str:
    """Return the name of an operator without namespace and overload: "mm" of "aten::mm.out"."""
    return str(operator.name()).partition("::")[2].partition(".")[0]


def is_free(operator: Any) -> bool:
    """Return whether an operator moves no data."""
    return operator.is_view or short_name(operator) in _FREE


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of arguments or results."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def moved(tensor: Tensor) -> int:
    """Return the bytes of a tensor that a kernel reads or writes; what is expanded counts once."""
    return math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride) * tensor.element_size()


def operands(operator: Any, args: Any) -> tuple[Tensor, Tensor]:
    """Return the factors of a matrix product."""
    return (args[1], args[2]) if operator in _WITH_SUMMAND else (args[0], args[1])


def product(operator: Any, args: Any, phase: Phase, filled: float = 1.0) -> Product:
    """Return what one of PRODUCTS computes, without the name of a weight.

    Args:
        filled: share of the rows of grouped products that belong to an expert; others are not computed.
    """
    first, second = operands(operator, args)
    batch, m, k, n = 1, first.shape[-2], first.shape[-1], second.shape[-1]
    if operator in _GROUPED:
        batch = max(first.shape[0] if first.dim() == 3 else 1, second.shape[0] if second.dim() == 3 else 1)
        if first.dim() == second.dim() == 2:  # the gradient of the weights: the summed dimension is split
            scaled = operator is _ATEN._scaled_grouped_mm.default
            batch = args[4 if scaled else 2].shape[0]
            k = round((k // batch - (ALIGNMENT if scaled else 0)) * filled)  # without the rows that align those of an expert
        elif first.dim() == 2:
            m = round(m // batch * filled)
        elif second.dim() == 2:
            n //= batch
    elif first.dim() == 3:
        batch = first.shape[0]
    return Product("", phase, m, n, k, batch, first.element_size())


def attention(q: Tensor, k: Tensor, v: Tensor, phase: Phase, pairs: float, ring: int = 1) -> AttentionCall:
    """Return a call of an attention kernel.

    Args:
        q, k, v: (batch, heads, positions, width).
        pairs: share of all pairs of query and key that is visible.
        ring: ranks between which keys and values rotate.
    """
    (batch, heads, queries, head_dim), keys, value_dim = q.shape, k.shape[2], v.shape[3]
    return AttentionCall(phase, batch, heads, k.shape[1], queries, keys, head_dim, value_dim, pairs, ring, q.element_size())


def visible_share(queries: int, keys: int, *, causal: bool, window: int | None) -> float:
    """Return the share of all (query, key) pairs that a causal mask and a window leave."""
    if window is not None and window < keys:
        return window / keys if causal else min(1.0, 2 * window / keys)
    return 0.5 * (1 + 1 / max(1, queries)) if causal else 1.0
