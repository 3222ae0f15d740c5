"""The test cases of tools/parity: small models of every family that cover its options."""

from __future__ import annotations

from typing import Any

#: Defaults of all variants, for the fields that a family has. The fields of a variant override them.
SIZES = {"layers": 2, "hidden": 48, "heads": 4, "kv_heads": 4, "ffn_hidden": 96, "vocab_size": 300, "max_positions": 40}

#: Rotary positions scaled to four times the original length.
ROPE_SCALED = {"heads": 2, "kv_heads": 2, "hidden": 64, "max_positions": 64, "rope_factor": 4.0}

#: A small Qwen3-Next.
NEXT = {
    "kv_heads": 2,
    "head_width": 16,
    "linear_key_heads": 2,
    "linear_value_heads": 4,
    "linear_key_dim": 12,
    "linear_value_dim": 10,
    "expert_ffn_hidden": 20,
    "shared_ffn_hidden": 24,
}
#: A small DeepSeek-V3: one dense block and two MoE blocks. The stock class has no multi-token prediction.
LATENT = {
    "layers": 3,
    "dense_layers": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "experts": 8,
    "shared_experts": 2,
    "expert_ffn_hidden": 20,
    "top_k": 3,
    "groups": 4,
    "topk_group": 2,
    "mtp_depth": 0,
}

#: A small GLM-4.5, without MTP modules either.
GROUPED = {
    "layers": 3,
    "kv_heads": 2,
    "head_width": 16,
    "rope_theta": 1e3,
    "dense_layers": 1,
    "experts": 8,
    "expert_ffn_hidden": 20,
    "top_k": 3,
    "mtp_depth": 0,
}

#: family -> variant -> fields of its configuration
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "apertus": {
        "default": {"rope_factor": 4.0, "rope_original_positions": 16, "rope_theta": 1e4},
        "unscaled": {"kv_heads": 2, "head_width": 16, "tie_embeddings": True, "rope_scaling": "none"},
    },
    "bert": {"sentence pairs": {}, "masked": {"next_sentence": False}, "untied": {"next_sentence": False, "tie_embeddings": False}},
    "bloom": {
        "tied": {},
        "six heads": {"heads": 6, "tie_embeddings": False},
    },  # ALiBi slopes differ if heads is no power of 2
    "deepseek_v3": {
        "latent queries": LATENT,
        "direct queries": {**LATENT, "q_lora_rank": None, "norm_topk_prob": False, "groups": 1, "topk_group": 1},
        "yarn": {
            **LATENT,
            "rope_scaling": "yarn",
            "rope_factor": 4.0,
            "rope_original_positions": 10,
            "rope_beta_fast": 4.0,
            "rope_mscale": 0.7,
            "rope_mscale_all": 1.0,
        },
        "kimi k2": {
            **LATENT,
            "groups": 1,
            "topk_group": 1,
            "rope_scaling": "yarn",
            "rope_factor": 4.0,
            "rope_original_positions": 10,
            "rope_beta_fast": 1.0,
            "rope_mscale": 1.0,
            "rope_mscale_all": 1.0,
        },
    },
    "gemma2": {
        "caps": {
            "layers": 4,
            "kv_heads": 2,
            "head_width": 16,
            "window": 6,
            "query_pre_attn_scalar": 3,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 2.0,
        },
        "uncapped": {
            "layers": 3,
            "head_width": 12,
            "window": 5,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 12,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_embeddings": False,
        },
        "yarn": {
            **ROPE_SCALED,
            "head_width": 32,
            "window": 9,
            "sliding_window_pattern": 1,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 2.0,
            "rope_scaling": "yarn",
            "rope_original_positions": 16,
            "rope_beta_fast": 8.0,
        },
    },
    "gemma3": {
        "window": {"layers": 4, "kv_heads": 2, "head_width": 16, "window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24},
        "linear": {
            "layers": 3,
            "heads": 2,
            "kv_heads": 1,
            "head_width": 32,
            "window": 8,
            "sliding_window_pattern": 3,
            "rope_theta": 1e3,
            "rope_local_theta": 1e2,
            "rope_scaling": "linear",
            "rope_factor": 8.0,
            "tie_embeddings": False,
        },
        "local": {"window": 5, "head_width": 12},  # fewer layers than an interval
    },
    "glm4_moe": {
        "air": {**GROUPED, "norm_topk_prob": False},
        "norms": {
            **GROUPED,
            "query_key_norm": True,
            "qkv_bias": False,
            "partial_rotary_factor": 0.25,
            "groups": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "tie_embeddings": True,
        },
        "yarn": {
            **GROUPED,
            "head_width": None,
            "partial_rotary_factor": 1.0,
            "dense_layers": 0,
            "rope_scaling": "yarn",
            "rope_factor": 4.0,
            "rope_original_positions": 10,
            "rope_beta_fast": 4.0,
        },
    },
    "gpt": {"tied": {}, "untied": {"tie_embeddings": False}},
    "gpt1": {"tied": {}},
    "gpt_neox": {
        "parallel": {"partial_rotary_factor": 0.5},
        "sequential": {"heads": 3, "parallel_residual": False, "attention_bias": False, "activation": "gelu_tanh", "tie_embeddings": True},
        "whole": {"layers": 3, "partial_rotary_factor": 1.0, "rope_theta": 1e3, "norm_eps": 1e-3},
        "linear": {"rope_scaling": "linear", "rope_factor": 4.0, "partial_rotary_factor": 0.7},
        "yarn": {
            **{key: value for key, value in ROPE_SCALED.items() if key != "kv_heads"},
            "rope_scaling": "yarn",
            "rope_original_positions": 16,
            "rope_beta_fast": 8.0,
        },
    },
    "gpt_oss": {  # small bounds of SwiGLU, so that they apply
        "both kinds of layers": {"layers": 4, "kv_heads": 2, "head_width": 16, "window": 6, "experts": 6, "top_k": 3, "swiglu_limit": 0.3},
        "local": {"heads": 3, "kv_heads": 1, "head_width": None, "window": 4, "sliding_window_pattern": 3, "experts": 4, "top_k": 1},
        "yarn": {
            "layers": 3,
            "kv_heads": 2,
            "head_width": 24,
            "window": 8,
            "sliding_window_pattern": 3,
            "experts": 5,
            "top_k": 5,
            "swiglu_limit": 0.5,
            "swiglu_alpha": 1.2,
            "attention_bias": False,
            "tie_embeddings": True,
            "rope_theta": 1e3,
            "rope_scaling": "yarn",
            "rope_factor": 4.0,
            "rope_original_positions": 13,
            "rope_beta_fast": 5.0,
            "rope_truncate": False,
        },
        "rounded yarn": {"experts": 4, "top_k": 2, "window": 40, "rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_positions": 10},
    },
    "granite": {
        "factors": {
            "kv_heads": 2,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.4,
            "logits_scaling": 1.5,
        },
        "yarn": {**ROPE_SCALED, "rope_scaling": "yarn", "rope_original_positions": 16, "rope_beta_fast": 8.0, "logits_scaling": 0.5},
        "untied": {"head_width": 16, "attention_multiplier": 0.25, "logits_scaling": 4.0, "tie_embeddings": False},
    },
    "llama": {
        "plain": {},
        "grouped": {"layers": 3, "hidden": 64, "heads": 8, "kv_heads": 2, "rope_theta": 500000.0, "norm_eps": 1e-3},
        "tied": {"kv_heads": 1, "tie_embeddings": True},
        "biases": {"kv_heads": 2, "attention_bias": True},
        "linear": {**ROPE_SCALED, "rope_scaling": "linear"},
        "llama3": {**ROPE_SCALED, "rope_scaling": "llama3", "rope_original_positions": 16},
        "yarn": {**ROPE_SCALED, "rope_scaling": "yarn", "rope_original_positions": 16, "rope_beta_fast": 8.0},
        "qwen2.5": {"kv_heads": 2, "qkv_bias": True},
        "qwen3": {"kv_heads": 2, "head_width": 16, "query_key_norm": True},
    },
    "mistral": {
        "window": {"kv_heads": 2, "head_width": 16, "window": 6},
        "dense": {"kv_heads": 2, "window": None, "rope_theta": 1e6},
    },
    "mixtral": {
        "two of four": {"kv_heads": 2, "experts": 4},
        "window": {"kv_heads": 2, "experts": 3, "top_k": 1, "window": 6, "tie_embeddings": True},
    },
    "nemotron": {
        "grouped": {"kv_heads": 2, "rope_theta": 1e3},
        "wide": {"layers": 3, "head_width": 20, "partial_rotary_factor": 0.7, "norm_eps": 1e-3, "tie_embeddings": True},
        "linear": {"kv_heads": 1, "rope_scaling": "linear", "rope_factor": 4.0, "partial_rotary_factor": 1.0},
        "yarn": {**ROPE_SCALED, "rope_scaling": "yarn", "rope_original_positions": 16, "rope_beta_fast": 8.0},
    },
    "olmo2": {
        "plain": {},
        "grouped": {"layers": 3, "kv_heads": 2, "head_width": 16, "tie_embeddings": True},
        "yarn": {**ROPE_SCALED, "rope_scaling": "yarn", "rope_original_positions": 16, "rope_beta_fast": 8.0},
    },
    "olmo3": {
        "window": {"layers": 5, "kv_heads": 2, "window": 6, "sliding_window_pattern": 2, "rope_theta": 1e3, "rope_local_theta": 1e2},
        "yarn": {
            **ROPE_SCALED,
            "layers": 4,
            "head_width": 16,
            "window": 7,
            "rope_local_theta": 1e3,
            "rope_scaling": "yarn",
            "rope_original_positions": 16,
            "rope_beta_fast": 8.0,
            "tie_embeddings": True,
        },
        "local": {"window": 5},  # fewer layers than an interval
    },
    "olmoe": {
        "unnormalized": {"experts": 8, "top_k": 3, "rope_theta": 1e3},
        "normalized": {"layers": 3, "kv_heads": 2, "experts": 5, "top_k": 2, "norm_topk_prob": True, "tie_embeddings": True},
        "yarn": {**ROPE_SCALED, "experts": 4, "top_k": 2, "rope_scaling": "yarn", "rope_original_positions": 16, "rope_beta_fast": 8.0},
    },
    "opt": {"pre-norm": {}, "post-norm": {"pre_norm": False, "embed_width": 32}},
    "phi3": {
        "dense": {"kv_heads": 2, "rope_theta": 1e4},
        "window": {"kv_heads": 1, "head_width": 16, "window": 6, "tie_embeddings": True},
    },
    "qwen3_moe": {
        "every block": {"kv_heads": 2, "head_width": 16, "experts": 8, "top_k": 3, "expert_ffn_hidden": 20},
        "some blocks": {
            "layers": 5,
            "kv_heads": 2,
            "head_width": 16,
            "experts": 6,
            "top_k": 2,
            "expert_ffn_hidden": 20,
            "expert_interval": 2,
            "dense_blocks": [1],
            "norm_topk_prob": False,
            "tie_embeddings": True,
        },
        "derived width": {"head_width": None, "experts": 4, "top_k": 4, "expert_ffn_hidden": 16, "rope_theta": 1e4},
    },
    "qwen3_next": {
        "every block": {**NEXT, "layers": 4, "experts": 8, "top_k": 3},
        "some blocks": {
            **NEXT,
            "layers": 5,
            "full_attention_interval": 2,
            "expert_interval": 2,
            "dense_blocks": [1],
            "linear_value_heads": 2,
            "linear_kernel": 3,
            "experts": 6,
            "top_k": 2,
            "norm_topk_prob": False,
            "tie_embeddings": True,
        },
        "yarn": {
            **NEXT,
            **ROPE_SCALED,
            "partial_rotary_factor": 0.5,
            "full_attention_interval": 1,
            "experts": 4,
            "top_k": 2,
            "rope_scaling": "yarn",
            "rope_original_positions": 16,
            "rope_beta_fast": 8.0,
        },
        "last": {**NEXT, "layers": 3, "full_attention_interval": 3, "linear_value_heads": 6, "experts": 4, "top_k": 2},
    },
    "roberta": {
        "tied": {},
        "untied": {"tie_embeddings": False},
        "xlm-r": {"model_type": "xlm-roberta"},
        "camembert": {"model_type": "camembert", "tie_embeddings": False},
    },
    "smollm3": {
        "every second": {"layers": 4, "kv_heads": 2, "no_rope_layer_interval": 2},
        "every third": {"layers": 4, "no_rope_layer_interval": 3, "head_width": 16, "tie_embeddings": False},
        "none": {"kv_heads": 2},
    },
    "t5": {
        "tied": {"layers": 4, "head_width": 12},
        "v1.1": {"layers": 4, "head_width": 16, "gated": True, "tie_embeddings": False, "init_std": 0.3},
        "unscaled": {"layers": 4, "head_width": 16, "gated": True, "scale_head": False, "init_std": 0.3},
        "uneven": {"layers": 3, "encoder_layers": 1, "buckets": 8, "max_distance": 16},
    },
    "transformer": {"tied": {"layers": 4}, "uneven": {"layers": 3, "encoder_layers": 2}},
}

#: Tolerance of the absolute difference of two logits. fp32 sums differ in their order; some families have more of them.
TOLERANCE = {"mixtral": 1e-4, "deepseek_v3": 1e-4, "qwen3_next": 1e-4}
DEFAULT_TOLERANCE = 1e-5
