"""Qwen3-Next <-> transformers' Qwen3NextForCausalLM. Its fused projections hold the rows of one key head after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.models.config_json_keys import partial_rope
from pipeline.models.huggingface_mapping import BlockTensors, KeyGroup, StockTensor, gated_experts, gated_mlp, positive, tensors
from pipeline.models.layer_kinds import LINEAR, layer_types
from pipeline.models.llama import huggingface as llama
from pipeline.models.qwen3_moe import huggingface as qwen3_moe
from pipeline.models.qwen3_next.config import Qwen3NextConfig


def _read_head_dim(content: dict[str, Any]) -> dict[str, Any]:
    """Return head_width; the class has 256 without the key, and hidden / heads if it is null or 0."""
    width = content.get("head_dim", 256)
    return {"head_width": None if width is None else positive("head_dim", width)}


def _table(config: Qwen3NextConfig) -> tuple[StockTensor | BlockTensors, ...]:
    hf, block = "model.layers.{i}", "blocks.{i}"
    attention, linear = f"{block}.attention", f"{hf}.linear_attn"
    full_tensors = (
        *tensors(f"{hf}.self_attn.q_proj", f"{attention}.query", f"{attention}.gate", interleaved="heads"),
        *tensors(f"{hf}.self_attn.k_proj", f"{attention}.key"),
        *tensors(f"{hf}.self_attn.v_proj", f"{attention}.value"),
        *tensors(f"{hf}.self_attn.o_proj", f"{attention}.output"),
        *llama.NORMS,
    )
    projections = [f"{attention}.{name}" for name in ("query", "key", "value", "gate")]
    linear_tensors = (
        StockTensor(f"{linear}.dt_bias", (f"{attention}.decay_bias",)),
        StockTensor(f"{linear}.A_log", (f"{attention}.decay_rate_log",)),
        StockTensor(f"{linear}.conv1d.weight", tuple(f"{attention}.{name}_conv" for name in ("query", "key", "value"))),
        *tensors(f"{linear}.in_proj_qkvz", *projections, interleaved="linear_key_heads"),
        *tensors(f"{linear}.in_proj_ba", f"{attention}.beta", f"{attention}.decay", interleaved="linear_key_heads"),
        *tensors(f"{linear}.norm", f"{attention}.output_norm"),
        *tensors(f"{linear}.out_proj", f"{attention}.output"),
    )
    norms = (*tensors(f"{hf}.input_layernorm", f"{block}.attention_norm"), *tensors(f"{hf}.post_attention_layernorm", f"{block}.mlp_norm"))
    moe_tensors = (
        *tensors(f"{hf}.mlp.gate", f"{block}.mlp.routed.router"),
        *gated_experts(f"{hf}.mlp", f"{block}.mlp.routed"),
        *gated_mlp(f"{hf}.mlp.shared_expert", f"{block}.mlp.shared"),
        *tensors(f"{hf}.mlp.shared_expert_gate", f"{block}.mlp.shared_gate"),
    )

    def of_block(index: int) -> BlockTensors:
        mixer = full_tensors if config.is_full(index) else linear_tensors
        feed_forward = moe_tensors if config.has_experts(index) else gated_mlp(f"{hf}.mlp", f"{block}.mlp")
        return BlockTensors((*norms, *mixer, *feed_forward), lambda _: [(index, index)], experts="experts")

    return (
        *tensors("model.embed_tokens", "embed.tokens"),
        *(of_block(index) for index in range(config.layers)),
        *tensors("model.norm", "norm"),
        *tensors("lm_head", "head"),
    )


MAPPING = replace(
    qwen3_moe.MAPPING,
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    fields={
        **qwen3_moe.MAPPING.fields,
        "shared_expert_intermediate_size": "shared_ffn_hidden",
        "linear_num_key_heads": "linear_key_heads",
        "linear_num_value_heads": "linear_value_heads",
        "linear_key_head_dim": "linear_key_dim",
        "linear_value_head_dim": "linear_value_dim",
        "linear_conv_kernel_dim": "linear_kernel",
    },
    constants={"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0},
    defaults={
        **qwen3_moe.MAPPING.defaults,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 5632,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    nested=(
        partial_rope(share=0.25),
        KeyGroup(("head_dim",), lambda config: {"head_dim": config.head_dim}, _read_head_dim),
        qwen3_moe.DENSE_BLOCKS,
        layer_types(default=4, interval_key="full_attention_interval", field="full_attention_interval", other=LINEAR),
    ),
    ignored_keys=("output_router_logits",),
    ignored_weights=("mtp.*",),
    table=_table,
)
