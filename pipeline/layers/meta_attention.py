"""The attention core that stands for a fused kernel where nothing is computed."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.layers.attention import with_sinks
from pipeline.layers.attention_kernel import pad_values
from pipeline.layers.mask import Mask


def meta_core(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    *,
    window: int | None = None,  # noqa: ARG001 - a core
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """An attention core for the meta device: one operation, as every fused kernel, without the restrictions of a GPU."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, pad_values(q, v), 0.0, mask.causal, False, scale=scale)[:2]
    out = out[..., : v.shape[3]]
    return out if sinks is None else with_sinks(out, lse, sinks)
