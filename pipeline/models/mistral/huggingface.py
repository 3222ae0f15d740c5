"""Mistral <-> transformers' MistralForCausalLM; the weights have Llama's names."""

from __future__ import annotations

from pipeline.models.adapter import Adapter
from pipeline.models.llama import huggingface as llama
from pipeline.models.rope_json import UNSCALED

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
        "intermediate_size": "ffn_hidden",
        "sliding_window": "window",
        "rms_norm_eps": "norm_eps",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_embeddings",
    },
    constants={"hidden_act": "silu", "attention_dropout": 0.0},
    table=llama.TABLE,
    defaults={
        "vocab_size": 32000,
        "max_position_embeddings": 4096 * 32,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "sliding_window": 4096,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    },
    nested=(UNSCALED, llama.HEAD_DIM),
)
