"""OLMo 2 <-> transformers' Olmo2ForCausalLM."""

from __future__ import annotations

from dataclasses import replace

from pipeline.models.adapter import rows
from pipeline.models.llama import huggingface as llama

ADAPTER = replace(
    llama.ADAPTER,
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    fields={key: field for key, field in llama.ADAPTER.fields.items() if key != "attention_bias"},
    constants={"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0},
    defaults={**llama.ADAPTER.defaults, "vocab_size": 50304, "rms_norm_eps": 1e-5},
    nested=(*llama.ADAPTER.nested, llama.NO_PADDING),
    implied={},
    table=(
        *rows("model.embed_tokens", "embed.tokens"),
        *rows("model.layers.{i}.self_attn.q_proj", "blocks.{i}.attention.query"),
        *rows("model.layers.{i}.self_attn.k_proj", "blocks.{i}.attention.key"),
        *rows("model.layers.{i}.self_attn.v_proj", "blocks.{i}.attention.value"),
        *rows("model.layers.{i}.self_attn.o_proj", "blocks.{i}.attention.output"),
        *rows("model.layers.{i}.self_attn.q_norm", "blocks.{i}.attention.query_norm"),
        *rows("model.layers.{i}.self_attn.k_norm", "blocks.{i}.attention.key_norm"),
        *rows("model.layers.{i}.post_attention_layernorm", "blocks.{i}.post_attention_norm"),
        *rows("model.layers.{i}.mlp.gate_proj", "blocks.{i}.mlp.gate"),
        *rows("model.layers.{i}.mlp.up_proj", "blocks.{i}.mlp.up"),
        *rows("model.layers.{i}.mlp.down_proj", "blocks.{i}.mlp.down"),
        *rows("model.layers.{i}.post_feedforward_layernorm", "blocks.{i}.post_mlp_norm"),
        *rows("model.norm", "norm"),
        *rows("lm_head", "head"),
    ),
)
