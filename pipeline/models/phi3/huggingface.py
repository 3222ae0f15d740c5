"""Phi-3 and Phi-4 <-> transformers' Phi3ForCausalLM, which joins queries, keys and values, and the two inner matrices of a feed-forward.

Supported are rotary positions of all dims of a head without scaling (Phi-4, Phi-3 mini 4k), not longrope and partial_rotary_factor (Phi-4
mini).
"""

from __future__ import annotations

from dataclasses import replace

from pipeline.models.config_json_keys import UNSCALED
from pipeline.models.huggingface_mapping import tensors
from pipeline.models.llama import huggingface as llama
from pipeline.models.mistral import huggingface as mistral

MAPPING = replace(
    mistral.MAPPING,
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    constants={**mistral.MAPPING.constants, "partial_rotary_factor": 1.0},
    defaults={
        **mistral.MAPPING.defaults,
        "vocab_size": 32064,
        "max_position_embeddings": 4096,
        "hidden_size": 3072,
        "num_key_value_heads": lambda content: content.get("num_attention_heads", 32),
        "intermediate_size": 8192,
        "rms_norm_eps": 1e-5,
    },
    nested=(
        UNSCALED,
        replace(llama.HEAD_DIM, read=lambda content: llama.HEAD_DIM.read({"hidden_size": 3072, **content})),
        llama.NO_PADDING,
        mistral.window(default=None),
    ),
    ignored_keys=("original_max_position_embeddings",),  # of longrope
    table=(
        *tensors("model.embed_tokens", "embed.tokens"),
        *tensors("model.layers.{i}.input_layernorm", "blocks.{i}.attention_norm"),
        *tensors("model.layers.{i}.self_attn.qkv_proj", *(f"blocks.{{i}}.attention.{name}" for name in ("query", "key", "value"))),
        *tensors("model.layers.{i}.self_attn.o_proj", "blocks.{i}.attention.output"),
        *tensors("model.layers.{i}.post_attention_layernorm", "blocks.{i}.mlp_norm"),
        *tensors("model.layers.{i}.mlp.gate_up_proj", "blocks.{i}.mlp.gate", "blocks.{i}.mlp.up"),
        *tensors("model.layers.{i}.mlp.down_proj", "blocks.{i}.mlp.down"),
        *tensors("model.norm", "norm"),
        *tensors("lm_head", "head"),
    ),
)
