"""QK-clip (optimizer.qk_clip) as plain loops over heads: Kimi Team 2025 (https://arxiv.org/abs/2507.20534), algorithm 1."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.layers.attention import repeat_kv
from pipeline.layers.mask import Mask


class PlainQKClip:
    """Records the largest logit of every head of a full model, and scales its weights after an update.

    Args:
        model: whose attention cores are replaced.
        threshold: tau; None does nothing.
    """

    def __init__(self, model: nn.Module, threshold: float | None) -> None:
        self._threshold = threshold
        self._layers: dict[str, Any] = {}
        if threshold is not None:
            self._layers = {name: module for name, module in model.named_modules() if hasattr(module, "core")}
        self._largest: dict[str, Tensor] = {}
        for name, layer in self._layers.items():
            layer.core = self._recording(name, layer.core)

    def _recording(self, name: str, core: Any) -> Any:
        def attend(
            q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, window: int | None = None, scale: float | None = None, **more: Any
        ) -> Tensor:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    keys, _ = repeat_kv(q, k, k)
                    logits = q @ keys.transpose(2, 3) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
                    allowed = mask.visible(q.shape[2], k.shape[2], q.device, window)
                    if allowed is None:
                        allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
                        allowed = allowed.tril() if mask.causal else allowed
                    largest = logits.masked_fill(~allowed, -math.inf).amax(dim=(0, 2, 3))
                    self._largest[name] = torch.maximum(self._largest.get(name, largest), largest)
            output: Tensor = core(q, k, v, mask, window=window, scale=scale, **more)
            return output

        return attend

    @torch.no_grad()
    def after_update(self, masters: Mapping[str, Tensor]) -> None:
        """Scale master weights by name."""
        if self._threshold is None:
            return
        for name, layer in self._layers.items():
            for head, largest in enumerate(self._largest.pop(name).tolist()):
                if largest > self._threshold:
                    self._scale(masters, name, layer, head, self._threshold / largest)

    @staticmethod
    def _scale(masters: Mapping[str, Tensor], name: str, layer: Any, head: int, gamma: float) -> None:
        root = math.sqrt(gamma)
        if hasattr(layer, "kv_lora_rank"):
            nope, rope, value = layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim
            queries, first = masters[f"{name}.query_up.weight"], head * (nope + rope)
            queries[first : first + nope] *= root
            queries[first + nope : first + nope + rope] *= gamma
            first = head * (nope + value)
            masters[f"{name}.key_value_up.weight"][first : first + nope] *= root
            return
        rows = slice(head * layer.head_dim, (head + 1) * layer.head_dim)
        shared = masters[f"{name}.query.weight"].shape[0] > masters[f"{name}.key.weight"].shape[0]
        for part, factor in (("query", gamma if shared else root), ("key", 1.0 if shared else root)):
            for kind in ("weight", "bias"):
                if f"{name}.{part}.{kind}" in masters and factor != 1.0:
                    masters[f"{name}.{part}.{kind}"][rows] *= factor
