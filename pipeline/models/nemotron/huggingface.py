"""Nemotron-4 <-> transformers' NemotronForCausalLM."""

from __future__ import annotations

from dataclasses import replace

from pipeline.models.config_json_keys import partial_rope
from pipeline.models.huggingface_mapping import tensors
from pipeline.models.llama import huggingface as llama

_BOTH = ("weight", "bias")
_NORMS = ("model.layers.{i}.input_layernorm.weight", "model.layers.{i}.post_attention_layernorm.weight", "model.norm.weight")

MAPPING = replace(
    llama.MAPPING,
    architecture="NemotronForCausalLM",
    model_type="nemotron",
    fields={
        **{key: field for key, field in llama.MAPPING.fields.items() if key not in ("rms_norm_eps", "attention_bias")},
        "norm_eps": "norm_eps",
    },
    constants={"hidden_act": "relu2", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0},
    defaults={
        "vocab_size": 256000,
        "max_position_embeddings": 4096,
        "hidden_size": 6144,
        "num_hidden_layers": 32,
        "num_attention_heads": 48,
        "num_key_value_heads": lambda content: content.get("num_attention_heads", 48),
        "intermediate_size": 24576,
        "norm_eps": 1e-5,
        "initializer_range": 0.0134,
        "tie_word_embeddings": False,
    },
    nested=(
        partial_rope(share=0.5),
        replace(llama.HEAD_DIM, read=lambda content: llama.HEAD_DIM.read({"hidden_size": 6144, "num_attention_heads": 48, **content})),
    ),
    implied={},
    table=tuple(
        entry
        for row in llama.TABLE
        if ".gate_proj." not in row.hf_name
        for entry in (
            tensors(row.hf_name.removesuffix(".weight"), row.names[0].removesuffix(".weight"), leaves=_BOTH)
            if row.hf_name in _NORMS
            else (row,)
        )
    ),
)
