"""GLM-4.5 <-> transformers' Glm4MoeForCausalLM. MTP modules follow the last layer, as in released files of 46 and 92 layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.models.config_json_keys import partial_rope
from pipeline.models.deepseek_v3.huggingface import COPIES, EXPERT_FIELDS, table, unexpected_modules, without_missing_modules
from pipeline.models.glm4_moe.config import Glm4MoeConfig
from pipeline.models.huggingface_mapping import StockTensor, tensors
from pipeline.models.llama import huggingface as llama


def _attention(module: str, config: Glm4MoeConfig) -> tuple[StockTensor, ...]:
    """Return the tensors of the attention and the norms of a block, which is `module` in our model."""
    hf = "model.layers.{i}"
    leaves = ("weight", "bias") if config.qkv_bias else ("weight",)
    projections = (("q_proj", "query"), ("k_proj", "key"), ("v_proj", "value"))
    norms = (("q_norm", "query_norm"), ("k_norm", "key_norm")) if config.query_key_norm else ()
    return (
        *tensors(f"{hf}.input_layernorm", f"{module}.attention_norm"),
        *(entry for name, ours in projections for entry in tensors(f"{hf}.self_attn.{name}", f"{module}.attention.{ours}", leaves=leaves)),
        *tensors(f"{hf}.self_attn.o_proj", f"{module}.attention.output"),
        *(entry for name, ours in norms for entry in tensors(f"{hf}.self_attn.{name}", f"{module}.attention.{ours}")),
        *tensors(f"{hf}.post_attention_layernorm", f"{module}.mlp_norm"),
    )


def _read_head_dim(content: dict[str, Any]) -> dict[str, Any]:
    """Return head_width, with the default sizes of the class."""
    return llama.HEAD_DIM.read({"hidden_size": 4096, "num_attention_heads": 96, **content})


MAPPING = replace(
    llama.MAPPING,
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    fields={**llama.MAPPING.fields, **EXPERT_FIELDS, "attention_bias": "qkv_bias", "use_qk_norm": "query_key_norm"},
    constants={"hidden_act": "silu", "attention_dropout": 0.0},
    defaults={
        **llama.MAPPING.defaults,
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "intermediate_size": 10944,
        "rms_norm_eps": 1e-5,
        "use_qk_norm": False,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 1,
    },
    nested=(partial_rope(share=0.5), replace(llama.HEAD_DIM, read=_read_head_dim)),
    implied={},
    ignored_weights=COPIES,
    from_weights=without_missing_modules,
    separate_weights=unexpected_modules(46, 92),
    table=lambda config: table(config, _attention),
)
