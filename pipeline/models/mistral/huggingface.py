"""Mistral <-> transformers' MistralForCausalLM; the weights have Llama's names."""

from __future__ import annotations

from typing import Any

from pipeline.models.config_json_keys import UNSCALED
from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, positive
from pipeline.models.llama import huggingface as llama

#: default of max_position_embeddings in Mistral's and Mixtral's classes
MAX_POSITIONS = 4096 * 32


def window(*, default: int | None) -> KeyGroup:
    """Return the key of the sliding window; a window that no sequence exceeds is full attention."""

    def read(content: dict[str, Any]) -> dict[str, Any]:
        width = content.get("sliding_window", default)
        positions = content.get("max_position_embeddings", MAX_POSITIONS)
        return {"window": None if width is None or positive("sliding_window", width) > positions else width}

    return KeyGroup(("sliding_window",), lambda config: {"sliding_window": config.window}, read)


MAPPING = HuggingFaceMapping(
    architecture="MistralForCausalLM",
    model_type="mistral",
    fields={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_positions",
        "hidden_size": "hidden",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "intermediate_size": "ffn_hidden",
        "rms_norm_eps": "norm_eps",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_embeddings",
    },
    constants={"hidden_act": "silu", "attention_dropout": 0.0},
    table=llama.TABLE,
    defaults={
        "vocab_size": 32000,
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": lambda content: content.get("num_key_value_heads", 8) or content.get("num_attention_heads", 32),
        "intermediate_size": 14336,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    },
    nested=(UNSCALED, llama.HEAD_DIM, window(default=4096)),
)
