"""FlexAttention (Dong et al. 2024, https://arxiv.org/abs/2412.05496) as a core: a mask's rules become code of a fused kernel.

No (queries, keys) tensor is made, and blocks of keys that no query of a block sees are skipped. On a CPU it runs unfused, as a reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pipeline.layers.attention import sdpa
from pipeline.layers.mask import Mask


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, window: int | None = None, scale: float | None = None) -> Tensor:
    """See Core (layers/attention.py)."""
    places = mask.places(q.shape[2], k.shape[2], q.device)
    blocks = mask.once(("flex", window), lambda: _block_mask(q, k, mask, places, window))
    options: dict[str, Any] = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    attention, _ = _functions(q.is_cuda)
    return attention(q, k, v, score_mod=_score_rule(mask, places), block_mask=blocks, **options)


def automatic(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, window: int | None = None, scale: float | None = None) -> Tensor:
    """Flex on a GPU where SDPA would need a (queries, keys) tensor, else SDPA. A bias is such a tensor already."""
    ruled = mask.has_rules(k.shape[2], window) or mask.slopes is not None
    core = flex if q.is_cuda and ruled and mask.bias is None else sdpa
    return core(q, k, v, mask, window=window, scale=scale)


@cache
def _functions(compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """FlexAttention and what makes its block masks. Imported when needed: it brings the compiler."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:
        return flex_attention, create_block_mask
    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask)


def _block_mask(q: Tensor, k: Tensor, mask: Mask, places: tuple[Tensor, Tensor], window: int | None) -> Any:
    """Which blocks of keys each block of queries sees; None when all see all."""
    if not mask.causal and not mask.has_rules(k.shape[2], window):
        return None
    _, create = _functions(q.is_cuda)
    return create(_sight_rule(mask, places, window), q.shape[0], None, q.shape[2], k.shape[2], device=q.device)


def _sight_rule(mask: Mask, places: tuple[Tensor, Tensor], window: int | None) -> Callable[..., Tensor]:
    """Mask.visible as a function of one query and key."""
    own, other = places
    theirs = mask.documents if mask.key_documents is None else mask.key_documents

    def sees(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001 - flex attention's signature
        row = sequence if len(own) > 1 else 0
        column = sequence if len(other) > 1 else 0
        distance = own[row, query] - other[column, key]
        seen = distance >= 0 if mask.causal else distance == distance
        if mask.causal and mask.prefix is not None:
            seen = seen | (other[column, key] < mask.prefix[sequence])
        if window is not None:
            seen = seen & (distance.abs() < window)
        if mask.documents is not None and theirs is not None:
            seen = seen & (mask.documents[sequence, query] == theirs[sequence, key])
        elif theirs is not None:
            seen = seen & (theirs[sequence, key] >= 0)
        return seen

    return sees


def _score_rule(mask: Mask, places: tuple[Tensor, Tensor]) -> Callable[..., Tensor] | None:
    """Mask.scores as a function of one score."""
    slopes, bias = mask.slopes, mask.bias
    own, other = places

    def sloped(score: Tensor, sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert slopes is not None
        row = sequence if len(own) > 1 else 0
        column = sequence if len(other) > 1 else 0
        return score - slopes[head] * (own[row, query] - other[column, key]).abs()

    def biased(score: Tensor, sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001 - see above
        assert bias is not None
        return score + bias[0, head, query, key]

    if slopes is not None:
        return sloped
    return biased if bias is not None else None
