"""Mistral <-> transformers' MistralForCausalLM, whose weights are named like Llama's."""

from __future__ import annotations

from pipeline.models.adapter import Adapter
from pipeline.models.llama import huggingface as llama

ADAPTER = Adapter(
    architecture="MistralForCausalLM",
    model_type="mistral",
    fields={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_positions",
        "hidden_size": "hidden",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "head_dim": "head_dim",
        "intermediate_size": "ffn_hidden",
        "sliding_window": "window",
        "rope_theta": "rope_theta",
        "rms_norm_eps": "norm_eps",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_embeddings",
    },
    constants={"hidden_act": "silu", "attention_dropout": 0.0},
    table=llama.ADAPTER.table,
)
