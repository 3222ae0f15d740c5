"""Llama <-> transformers' LlamaForCausalLM."""

from __future__ import annotations

from pipeline.models.adapter import Adapter, rows
from pipeline.models.rope_json import ROPE

ADAPTER = Adapter(
    architecture="LlamaForCausalLM",
    model_type="llama",
    fields={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_positions",
        "hidden_size": "hidden",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "head_dim": "head_dim",
        "intermediate_size": "ffn_hidden",
        "rms_norm_eps": "norm_eps",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_embeddings",
    },
    constants={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0},
    defaults={
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": lambda content: content.get("num_attention_heads", 32),
        "head_dim": lambda content: content.get("hidden_size", 4096) // content.get("num_attention_heads", 32),
        "intermediate_size": 11008,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    },
    nested=(ROPE,),
    table=(
        *rows("model.embed_tokens", "embed.tokens"),
        *rows("model.layers.{i}.input_layernorm", "blocks.{i}.attention_norm"),
        *rows("model.layers.{i}.self_attn.q_proj", "blocks.{i}.attention.query"),
        *rows("model.layers.{i}.self_attn.k_proj", "blocks.{i}.attention.key"),
        *rows("model.layers.{i}.self_attn.v_proj", "blocks.{i}.attention.value"),
        *rows("model.layers.{i}.self_attn.o_proj", "blocks.{i}.attention.output"),
        *rows("model.layers.{i}.post_attention_layernorm", "blocks.{i}.mlp_norm"),
        *rows("model.layers.{i}.mlp.gate_proj", "blocks.{i}.mlp.gate"),
        *rows("model.layers.{i}.mlp.up_proj", "blocks.{i}.mlp.up"),
        *rows("model.layers.{i}.mlp.down_proj", "blocks.{i}.mlp.down"),
        *rows("model.norm", "norm"),
        *rows("lm_head", "head"),
    ),
)
