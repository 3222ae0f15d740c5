"""FlexAttention (Dong et al. 2024, https://arxiv.org/abs/2412.05496) as a core: the mask is compiled into a fused kernel.

No (queries, keys) tensor is allocated, and fully masked blocks are skipped. On a CPU it runs unfused, as a reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from pipeline.layers.attention import with_sinks
from pipeline.layers.mask import Mask, capped


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See Core (layers/attention.py)."""
    positions = mask.token_positions(q.shape[2], k.shape[2], q.device)
    blocks = block_mask(mask, (q.shape[0], q.shape[2], k.shape[2]), q.device, window)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    attention, _ = _functions(q.is_cuda)
    if sinks is None:
        return attention(q, k, v, score_mod=_score_mod(mask, positions), block_mask=blocks, **options)
    out, lse = attention(q, k, v, score_mod=_score_mod(mask, positions), block_mask=blocks, return_lse=True, **options)
    return with_sinks(out, lse, sinks)


@cache
def _functions(compiled: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return flex_attention and create_block_mask. Imported on first use, since the import loads the compiler."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if not compiled:
        return flex_attention, create_block_mask
    return torch.compile(flex_attention, dynamic=False), torch.compile(create_block_mask)


def block_mask(mask: Mask, shape: tuple[int, int, int], device: torch.device, window: int | None) -> Any:
    """Return the BlockMask, None when nothing is masked; computed once for all layers, if the first call is outside of compiled blocks.

    Args:
        mask: see Mask.
        shape: (batch, queries, keys).
        device: of the mask.
        window: as in Mask.visible.
    """
    return mask.cached(("flex", window), lambda: _block_mask(mask, shape, device, window))


def _block_mask(mask: Mask, shape: tuple[int, int, int], device: torch.device, window: int | None) -> Any:
    """See block_mask."""
    batch, queries, keys = shape
    if not mask.causal and not mask.has_rules(keys, window):
        return None
    _, create = _functions(device.type == "cuda")
    positions = mask.token_positions(queries, keys, device)
    return create(_mask_mod(mask, positions, window), batch, None, queries, keys, device=device)


def _mask_mod(mask: Mask, positions: tuple[Tensor, Tensor], window: int | None) -> Callable[..., Tensor]:
    """Return Mask.visible as FlexAttention's mask_mod, a function of one query and one key."""
    query_positions, key_positions = positions
    key_documents = mask.documents if mask.key_documents is None else mask.key_documents

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001 - flex attention's signature
        query_row = batch if len(query_positions) > 1 else 0
        key_row = batch if len(key_positions) > 1 else 0
        distance = query_positions[query_row, query] - key_positions[key_row, key]
        allowed = distance >= 0 if mask.causal else distance == distance
        if mask.causal and mask.prefix is not None:
            allowed = allowed | (key_positions[key_row, key] < mask.prefix[batch])
        if window is not None:
            allowed = allowed & (distance.abs() < window)
        if mask.documents is not None and key_documents is not None:
            allowed = allowed & (mask.documents[batch, query] == key_documents[batch, key])
        elif key_documents is not None:
            allowed = allowed & (key_documents[batch, key] >= 0)
        return allowed

    return mask_mod


def _score_mod(mask: Mask, positions: tuple[Tensor, Tensor]) -> Callable[..., Tensor] | None:
    """Return Mask.changed as FlexAttention's score_mod, a function of one score; None when there is nothing to change."""
    slopes, bias, softcap = mask.slopes, mask.bias, mask.softcap
    query_positions, key_positions = positions

    def alibi(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        assert slopes is not None
        query_row = batch if len(query_positions) > 1 else 0
        key_row = batch if len(key_positions) > 1 else 0
        return score - slopes[head] * (query_positions[query_row, query] - key_positions[key_row, key]).abs()

    def add_bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001 - see above
        assert bias is not None
        return score + bias[0, head, query, key]

    def cap(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001 - see above
        assert softcap is not None
        return capped(score, softcap)

    if slopes is not None:
        return alibi
    return add_bias if bias is not None else cap if softcap is not None else None
