"""OLMo 2 <-> transformers' Olmo2ForCausalLM."""

from __future__ import annotations

from dataclasses import replace

from pipeline.models.huggingface_mapping import tensors
from pipeline.models.llama import huggingface as llama

MAPPING = replace(
    llama.MAPPING,
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    fields={key: field for key, field in llama.MAPPING.fields.items() if key != "attention_bias"},
    constants={"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0},
    defaults={**llama.MAPPING.defaults, "vocab_size": 50304, "rms_norm_eps": 1e-5},
    nested=(*llama.MAPPING.nested, llama.NO_PADDING),
    implied={},
    table=(
        *tensors("model.embed_tokens", "embed.tokens"),
        *tensors("model.layers.{i}.self_attn.q_proj", "blocks.{i}.attention.query"),
        *tensors("model.layers.{i}.self_attn.k_proj", "blocks.{i}.attention.key"),
        *tensors("model.layers.{i}.self_attn.v_proj", "blocks.{i}.attention.value"),
        *tensors("model.layers.{i}.self_attn.o_proj", "blocks.{i}.attention.output"),
        *tensors("model.layers.{i}.self_attn.q_norm", "blocks.{i}.attention.query_norm"),
        *tensors("model.layers.{i}.self_attn.k_norm", "blocks.{i}.attention.key_norm"),
        *tensors("model.layers.{i}.post_attention_layernorm", "blocks.{i}.post_attention_norm"),
        *tensors("model.layers.{i}.mlp.gate_proj", "blocks.{i}.mlp.gate"),
        *tensors("model.layers.{i}.mlp.up_proj", "blocks.{i}.mlp.up"),
        *tensors("model.layers.{i}.mlp.down_proj", "blocks.{i}.mlp.down"),
        *tensors("model.layers.{i}.post_feedforward_layernorm", "blocks.{i}.post_mlp_norm"),
        *tensors("model.norm", "norm"),
        *tensors("lm_head", "head"),
    ),
)
