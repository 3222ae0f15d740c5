"""DeepSeek-V3 and Kimi K2 <-> transformers' DeepseekV3ForCausalLM. MTP modules follow the last layer, as in released files of 61 layers.

The released files contain copies of the embedding and the head for each MTP module; these are ignored on import and not exported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pipeline.models.config_json_keys import ROPE
from pipeline.models.huggingface_mapping import (
    BlockTensors,
    HuggingFaceMapping,
    KeyGroup,
    StockTensor,
    StoredTensors,
    gated_experts,
    gated_mlp,
    refusal,
    tensors,
)

Indices = Iterator[tuple[int, int]]


def _dense_blocks(config: Any) -> Indices:
    return ((index, index) for index in range(config.dense_layers))


def _moe_blocks(config: Any) -> Indices:
    return ((index, index) for index in range(config.dense_layers, config.layers))


def _mtp_modules(config: Any) -> Indices:
    return ((config.layers + index, index) for index in range(config.mtp_depth))


def _attention(module: str, config: Any) -> tuple[StockTensor, ...]:
    """Return the tensors of the attention and the norms of a block, which is `module` in our model."""
    hf = "model.layers.{i}"
    low_rank = (
        *tensors(f"{hf}.self_attn.q_a_proj", f"{module}.attention.query_down"),
        *tensors(f"{hf}.self_attn.q_a_layernorm", f"{module}.attention.query_norm"),
        *tensors(f"{hf}.self_attn.q_b_proj", f"{module}.attention.query_up"),
    )
    return (
        *tensors(f"{hf}.input_layernorm", f"{module}.attention_norm"),
        *(low_rank if config.q_lora_rank else tensors(f"{hf}.self_attn.q_proj", f"{module}.attention.query_up")),
        *tensors(f"{hf}.self_attn.kv_a_proj_with_mqa", f"{module}.attention.key_value_down"),
        *tensors(f"{hf}.self_attn.kv_a_layernorm", f"{module}.attention.key_value_norm"),
        *tensors(f"{hf}.self_attn.kv_b_proj", f"{module}.attention.key_value_up"),
        *tensors(f"{hf}.self_attn.o_proj", f"{module}.attention.output"),
        *tensors(f"{hf}.post_attention_layernorm", f"{module}.mlp_norm"),
    )


def _moe(module: str) -> tuple[StockTensor, ...]:
    """Return the tensors of a MoE layer: router, routed experts and shared expert."""
    hf = "model.layers.{i}.mlp"
    return (
        *tensors(f"{hf}.gate", f"{module}.mlp.routed.router"),
        StockTensor(f"{hf}.gate.e_score_correction_bias", (f"{module}.mlp.routed.router.bias",)),
        *gated_experts(hf, f"{module}.mlp.routed"),
        *gated_mlp(f"{hf}.shared_experts", f"{module}.mlp.shared"),
    )


DEFAULTS: dict[str, Any] = {
    "vocab_size": 129280,
    "max_position_embeddings": 4096,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": lambda content: content.get("num_key_value_heads", 128) or content.get("num_attention_heads", 128),
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 3,
    "intermediate_size": 18432,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}


def _read_widths(content: dict[str, Any]) -> dict[str, Any]:
    """Verify widths that the class derives from others, and that a file can override."""
    rotated, others = (content.get(key, DEFAULTS[key]) for key in ("qk_rope_head_dim", "qk_nope_head_dim"))
    for key, expected in (("head_dim", rotated), ("qk_head_dim", rotated + others)):
        if content.get(key, expected) != expected:
            raise refusal(key, content[key], f"must be {expected}, given the other keys", f"remove {key} from config.json")
    return {}


def unexpected_modules(*expected: int) -> Callable[[Any], tuple[str, ...]]:
    """Return `separate_weights` of a class that expects MTP modules as these layers only, where released models have one."""
    return lambda config: tuple(f"model.layers.{index}.*" for index, _ in _mtp_modules(config) if index not in expected)


def without_missing_modules(config: Any, stored: StoredTensors) -> Any:
    """The class saves no MTP modules, whatever num_nextn_predict_layers is; files have all of them or none."""
    numbers = {int(name.split(".")[2]) for name in stored.names() if re.match(r"model\.layers\.\d+\.", name)}
    return config if any(number >= config.layers for number in numbers) else replace(config, mtp_depth=0)


def table(config: Any, attention: Callable[[str, Any], tuple[StockTensor, ...]]) -> tuple[StockTensor | BlockTensors, ...]:
    """Return the tensors of a model with MoE layers and MTP modules.

    Args:
        config: a configuration with the fields of SharedExpertsConfig.
        attention: (block, configuration) -> the tensors of the attention and the norms of a block.
    """
    block, depth = "blocks.{i}", "head.depths.{i}.block"
    return (
        *tensors("model.embed_tokens", "embed.tokens"),
        BlockTensors((*attention(block, config), *gated_mlp("model.layers.{i}.mlp", f"{block}.mlp")), _dense_blocks),
        BlockTensors((*attention(block, config), *_moe(block)), _moe_blocks, experts="experts"),
        BlockTensors(
            (
                *tensors("model.layers.{i}.enorm", "head.depths.{i}.token_norm"),
                *tensors("model.layers.{i}.hnorm", "head.depths.{i}.hidden_norm"),
                *tensors("model.layers.{i}.eh_proj", "head.depths.{i}.project"),
                *attention(depth, config),
                *_moe(depth),
                *tensors("model.layers.{i}.shared_head.norm", "head.depths.{i}.final_norm"),
            ),
            _mtp_modules,
            experts="experts",
        ),
        *tensors("model.norm", "norm"),
        *tensors("lm_head", "head.output"),
    )


#: The keys of MoE layers and MTP modules.
EXPERT_FIELDS = {
    "first_k_dense_replace": "dense_layers",
    "intermediate_size": "ffn_hidden",
    "n_routed_experts": "experts",
    "n_shared_experts": "shared_experts",
    "moe_intermediate_size": "expert_ffn_hidden",
    "num_experts_per_tok": "top_k",
    "n_group": "groups",
    "topk_group": "topk_group",
    "norm_topk_prob": "norm_topk_prob",
    "routed_scaling_factor": "routed_scaling_factor",
    "num_nextn_predict_layers": "mtp_depth",
}
#: Copies of the embedding and the head in MTP modules.
COPIES = ("model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight")

MAPPING = HuggingFaceMapping(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    other_model_types=("kimi_k2",),  # Kimi K2, whose class is this one
    fields={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_positions",
        "hidden_size": "hidden",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_nope_head_dim": "qk_nope_head_dim",
        "qk_rope_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
        **EXPERT_FIELDS,
        "rms_norm_eps": "norm_eps",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_embeddings",
    },
    constants={
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_interleave": True,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    nested=(ROPE, KeyGroup(("head_dim", "qk_head_dim"), lambda _: {}, _read_widths)),
    defaults=DEFAULTS,
    ignored_weights=COPIES,
    from_weights=without_missing_modules,
    separate_weights=unexpected_modules(61),
    table=lambda config: table(config, _attention),
)
