"""Apertus <-> transformers' ApertusForCausalLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.layers.mlp import XIELU
from pipeline.models.config_json_keys import ROPE
from pipeline.models.huggingface_mapping import StockTensor, tensors
from pipeline.models.llama import huggingface as llama

#: The rope parameters of the class if config.json has none.
_DEFAULT_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _read_rope(content: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary fields; without rope_scaling and rope_parameters, the class does not read rope_theta either."""
    if not content.get("rope_scaling") and content.get("rope_parameters") is None:
        return ROPE.read({"rope_parameters": _DEFAULT_ROPE})
    return ROPE.read({"rope_theta": 12000000.0, **content})


MAPPING = replace(
    llama.MAPPING,
    architecture="ApertusForCausalLM",
    model_type="apertus",
    fields={key: field for key, field in llama.MAPPING.fields.items() if key != "attention_bias"},
    constants={"hidden_act": "xielu", "attention_bias": False, "attention_dropout": 0.0},
    defaults={
        **llama.MAPPING.defaults,
        "vocab_size": 131072,
        "max_position_embeddings": 65536,
        "intermediate_size": 14336,
        "rms_norm_eps": 1e-5,
    },
    nested=(replace(ROPE, read=_read_rope), llama.HEAD_DIM, llama.NO_PADDING),
    implied={},
    table=(
        *tensors("model.embed_tokens", "embed.tokens"),
        *tensors("model.layers.{i}.attention_layernorm", "blocks.{i}.attention_norm"),
        *tensors("model.layers.{i}.self_attn.q_proj", "blocks.{i}.attention.query"),
        *tensors("model.layers.{i}.self_attn.k_proj", "blocks.{i}.attention.key"),
        *tensors("model.layers.{i}.self_attn.v_proj", "blocks.{i}.attention.value"),
        *tensors("model.layers.{i}.self_attn.o_proj", "blocks.{i}.attention.output"),
        *llama.NORMS,
        *tensors("model.layers.{i}.feedforward_layernorm", "blocks.{i}.mlp_norm"),
        *tensors("model.layers.{i}.mlp.up_proj", "blocks.{i}.mlp.up"),
        *tensors("model.layers.{i}.mlp.act_fn", "blocks.{i}.mlp.activation", leaves=("alpha_p", "alpha_n")),
        StockTensor("model.layers.{i}.mlp.act_fn.beta", (), constant=XIELU.BETA),
        StockTensor("model.layers.{i}.mlp.act_fn.eps", (), constant=XIELU.EPS),
        *tensors("model.layers.{i}.mlp.down_proj", "blocks.{i}.mlp.down"),
        *tensors("model.norm", "norm"),
        *tensors("lm_head", "head"),
    ),
)
