"""Gemma 2 <-> transformers' Gemma2ForCausalLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.models.config_json_keys import ROPE
from pipeline.models.gemma3 import huggingface as gemma3
from pipeline.models.huggingface_mapping import KeyGroup, refusal
from pipeline.models.layer_kinds import layer_types
from pipeline.models.llama import huggingface as llama

_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _read_direction(content: dict[str, Any]) -> dict[str, Any]:
    """Verify that attention is causal."""
    if content.get("use_bidirectional_attention"):
        raise refusal("use_bidirectional_attention", content["use_bidirectional_attention"], "is not supported by this family")
    return {}


MAPPING = replace(
    gemma3.MAPPING,
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    wrappers=(),
    fields={**gemma3.MAPPING.fields, **{key: key for key in _CAPS}},
    constants={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "attention_dropout": 0.0},
    defaults={
        **gemma3.MAPPING.defaults,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    nested=(
        ROPE,
        gemma3.HEAD_DIM,
        llama.NO_PADDING,
        layer_types(default=2),
        KeyGroup(("use_bidirectional_attention",), lambda _: {}, _read_direction),
    ),
    ignored_keys=(),
    table=tuple(entry for entry in gemma3.MAPPING.table if entry not in llama.NORMS),  # type: ignore[union-attr] # a tuple
)
