"""Qwen3-MoE <-> transformers' Qwen3MoeForCausalLM. Files contain a tensor for each expert; the class fuses them on loading."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.models.config_json_keys import ROPE
from pipeline.models.huggingface_mapping import BlockTensors, KeyGroup, StockTensor, gated_experts, gated_mlp, refusal, tensors
from pipeline.models.llama import huggingface as llama
from pipeline.models.qwen3_moe.config import Qwen3MoeConfig


def _read_dense_blocks(content: dict[str, Any]) -> dict[str, Any]:
    """Return dense_blocks, empty without the key."""
    blocks = content.get("mlp_only_layers")
    if blocks is not None and not (isinstance(blocks, list) and all(type(block) is int for block in blocks)):
        raise refusal("mlp_only_layers", blocks, "must be a list of integers", "fix config.json")
    return {"dense_blocks": sorted(set(blocks or []))}


DENSE_BLOCKS = KeyGroup(("mlp_only_layers",), lambda config: {"mlp_only_layers": list(config.dense_blocks)}, _read_dense_blocks)


def _table(config: Qwen3MoeConfig) -> tuple[StockTensor | BlockTensors, ...]:
    hf, block = "model.layers.{i}.mlp", "blocks.{i}.mlp"
    routed = [index for index in range(config.layers) if config.has_experts(index)]
    dense = [index for index in range(config.layers) if not config.has_experts(index)]
    return (
        *tensors("model.embed_tokens", "embed.tokens"),
        BlockTensors((*llama.ATTENTION, *llama.NORMS, *gated_mlp(hf, block)), lambda _: ((index, index) for index in dense)),
        BlockTensors(
            (*llama.ATTENTION, *llama.NORMS, *tensors(f"{hf}.gate", f"{block}.router"), *gated_experts(hf, block)),
            lambda _: ((index, index) for index in routed),
            experts="experts",
        ),
        *tensors("model.norm", "norm"),
        *tensors("lm_head", "head"),
    )


MAPPING = replace(
    llama.MAPPING,
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    fields={
        **{key: field for key, field in llama.MAPPING.fields.items() if key != "attention_bias"},
        "moe_intermediate_size": "expert_ffn_hidden",
        "num_experts": "experts",
        "num_experts_per_tok": "top_k",
        "norm_topk_prob": "norm_topk_prob",
        "decoder_sparse_step": "expert_interval",
    },
    constants={"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False},
    defaults={
        **llama.MAPPING.defaults,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    nested=(
        ROPE,
        replace(llama.HEAD_DIM, read=lambda content: llama.HEAD_DIM.read({"hidden_size": 2048, **content})),
        DENSE_BLOCKS,
    ),
    # The class averages over the tokens of all layers together, and does not divide by top_k (layers/router.py).
    training_keys={"router_aux_loss_coef": "balance_loss"},
    ignored_keys=("sliding_window", "output_router_logits"),  # off, since use_sliding_window is false; a training setting
    implied={},
    table=_table,
)
