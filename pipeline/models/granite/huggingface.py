"""Granite 3 <-> transformers' GraniteForCausalLM; the weights have Llama's names."""

from __future__ import annotations

from dataclasses import replace

from pipeline.models.llama import huggingface as llama

#: keys of the factors, which are fields of the same name; the class has 1 without them
_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")

MAPPING = replace(
    llama.MAPPING,
    architecture="GraniteForCausalLM",
    model_type="granite",
    fields={
        **{key: field for key, field in llama.MAPPING.fields.items() if key != "attention_bias"},
        **{key: key for key in _FACTORS},
    },
    constants={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0},
    defaults={**llama.MAPPING.defaults, **dict.fromkeys(_FACTORS, 1.0)},
    implied={},
    table=llama.TABLE,
)
