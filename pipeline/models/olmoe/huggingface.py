"""OLMoE <-> transformers' OlmoeForCausalLM. Files contain a tensor for each expert; the class fuses them on loading."""

from __future__ import annotations

from dataclasses import replace

from pipeline.models.config_json_keys import ROPE
from pipeline.models.huggingface_mapping import BlockTensors, gated_experts, tensors
from pipeline.models.llama import huggingface as llama

MAPPING = replace(
    llama.MAPPING,
    architecture="OlmoeForCausalLM",
    model_type="olmoe",
    fields={
        **{key: field for key, field in llama.MAPPING.fields.items() if key != "attention_bias"},
        "head_dim": "head_dim",
        "num_experts": "experts",
        "num_experts_per_tok": "top_k",
        "norm_topk_prob": "norm_topk_prob",
    },
    constants={"hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None},
    defaults={
        **llama.MAPPING.defaults,
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": lambda content: content.get("num_attention_heads", 16),
        "head_dim": lambda content: content.get("hidden_size", 2048) // content.get("num_attention_heads", 16),
        "intermediate_size": 2048,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    nested=(ROPE, llama.NO_PADDING),
    # The class averages over the tokens of all layers together, and does not divide by top_k (layers/router.py).
    training_keys={"router_aux_loss_coef": "balance_loss"},
    ignored_keys=("output_router_logits",),  # a training setting
    implied={"head_width": None},  # the class has the norms of queries and keys of the width of hidden / heads
    table=(
        *tensors("model.embed_tokens", "embed.tokens"),
        BlockTensors(
            (
                *llama.ATTENTION,
                *llama.NORMS,
                *tensors("model.layers.{i}.mlp.gate", "blocks.{i}.mlp.router"),
                *gated_experts("model.layers.{i}.mlp", "blocks.{i}.mlp"),
            ),
            experts="experts",
        ),
        *tensors("model.norm", "norm"),
        *tensors("lm_head", "head"),
    ),
)
