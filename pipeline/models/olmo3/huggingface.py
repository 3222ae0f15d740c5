"""OLMo 3 <-> transformers' Olmo3ForCausalLM; the weights have OLMo 2's names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.models.huggingface_mapping import KeyGroup, positive
from pipeline.models.layer_kinds import layer_types, rope_by_kind
from pipeline.models.llama import huggingface as llama
from pipeline.models.olmo2 import huggingface as olmo2


def _read_window(content: dict[str, Any]) -> dict[str, Any]:
    """Return window, at most the longest sequence: the default of the class is longer than its default of that."""
    return {"window": min(positive("sliding_window", content.get("sliding_window", 4096)), content.get("max_position_embeddings", 2048))}


MAPPING = replace(
    olmo2.MAPPING,
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    nested=(
        rope_by_kind(theta=500000.0, local_theta=500000.0, positions=2048),
        llama.HEAD_DIM,
        llama.NO_PADDING,
        layer_types(default=4),
        KeyGroup(("sliding_window",), lambda config: {"sliding_window": config.window}, _read_window),
    ),
)
