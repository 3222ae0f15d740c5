"""Mixtral <-> transformers' MixtralForCausalLM. Files contain a tensor for each expert; the class fuses them on loading."""

from __future__ import annotations

from dataclasses import replace

from pipeline.models.config_json_keys import UNSCALED
from pipeline.models.huggingface_mapping import BlockTensors, HuggingFaceMapping, StockTensor, tensors
from pipeline.models.mistral.huggingface import MAX_POSITIONS, window

MAPPING = HuggingFaceMapping(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    fields={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_positions",
        "hidden_size": "hidden",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "head_dim": "head_dim",
        "intermediate_size": "ffn_hidden",
        "num_local_experts": "experts",
        "num_experts_per_tok": "top_k",
        "rms_norm_eps": "norm_eps",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_embeddings",
    },
    constants={"hidden_act": "silu", "attention_dropout": 0.0},
    defaults={
        "vocab_size": 32000,
        "max_position_embeddings": MAX_POSITIONS,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": lambda content: content.get("num_key_value_heads", 8) or content.get("num_attention_heads", 32),
        "head_dim": lambda content: content.get("hidden_size", 4096) // content.get("num_attention_heads", 32),
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    },
    nested=(replace(UNSCALED, read=lambda content: UNSCALED.read({"rope_theta": 1e6, **content})), window(default=None)),
    # The class averages over the tokens of all layers together, and does not divide by top_k (layers/router.py).
    training_keys={"router_aux_loss_coef": "balance_loss"},
    renamed=((r"^(model\.layers\.\d+)\.mlp\.", r"\1.block_sparse_moe."),),  # the parameters of the class, which other tools save
    ignored_keys=("router_jitter_noise", "output_router_logits"),  # training settings
    table=(
        *tensors("model.embed_tokens", "embed.tokens"),
        BlockTensors(
            (
                *tensors("model.layers.{i}.input_layernorm", "blocks.{i}.attention_norm"),
                *tensors("model.layers.{i}.self_attn.q_proj", "blocks.{i}.attention.query"),
                *tensors("model.layers.{i}.self_attn.k_proj", "blocks.{i}.attention.key"),
                *tensors("model.layers.{i}.self_attn.v_proj", "blocks.{i}.attention.value"),
                *tensors("model.layers.{i}.self_attn.o_proj", "blocks.{i}.attention.output"),
                *tensors("model.layers.{i}.post_attention_layernorm", "blocks.{i}.mlp_norm"),
                *tensors("model.layers.{i}.block_sparse_moe.gate", "blocks.{i}.mlp.router"),
                StockTensor("model.layers.{i}.block_sparse_moe.experts.{e}.w1.weight", ("blocks.{i}.mlp.experts.gate",)),
                StockTensor("model.layers.{i}.block_sparse_moe.experts.{e}.w3.weight", ("blocks.{i}.mlp.experts.up",)),
                StockTensor("model.layers.{i}.block_sparse_moe.experts.{e}.w2.weight", ("blocks.{i}.mlp.experts.down",)),
            ),
            experts="experts",
        ),
        *tensors("model.norm", "norm"),
        *tensors("lm_head", "head"),
    ),
)
