"""A config.json with the keys and sizes of a released model is read as the size in conf/model.

Without keys that have no effect: real_configs.py has whole files.
"""

import json

import pytest

from pipeline.conversion import import_model
from pipeline.models import config_json, registry
from tests.models.real_configs import CONFIGS

RELEASED = {
    "qwen2.5-7b": """
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 131072, "use_mrope": false, "tie_word_embeddings": false, "use_sliding_window": false, "hidden_size": 3584,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
        "max_position_embeddings": 131072}
    """,
    "olmo2-7b": """
        {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": false, "hidden_act": "silu", "rms_norm_eps": 1e-06,
        "rope_scaling": null, "rope_theta": 500000, "tie_word_embeddings": false, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 100352, "max_position_embeddings":
        4096}
    """,
    "smollm3-3b": """
        {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "attention_bias": false, "mlp_bias": false, "hidden_act": "silu",
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 0,
        1, 1, 1, 0, 1, 1, 1, 0], "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 5000000.0, "sliding_window": null,
        "use_sliding_window": false, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
        "intermediate_size": 11008, "vocab_size": 128256, "max_position_embeddings": 65536}
    """,
    "gemma3-1b": """
        {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": false, "attn_logit_softcapping": null,
        "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": 512,
        "sliding_window_pattern": 6, "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        "intermediate_size": 6912, "vocab_size": 262144, "max_position_embeddings": 32768}
    """,
    "gemma3-270m": """
        {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": false, "attn_logit_softcapping": null,
        "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_scaling": null, "rope_theta": 1000000.0, "sliding_window": 512,
        "_sliding_window_pattern": 6, "use_bidirectional_attention": false, "hidden_size": 640, "num_hidden_layers": 18,
        "num_attention_heads": 4, "num_key_value_heads": 1, "intermediate_size": 2048, "vocab_size": 262144, "max_position_embeddings":
        32768, "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention",
        "full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention",
        "full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention",
        "full_attention"]}
    """,
    "apertus-8b": """
        {"architectures": ["ApertusForCausalLM"], "model_type": "apertus", "attention_bias": false, "hidden_act": "xielu", "mlp_bias":
        false, "post_norm": false, "qk_norm": true, "rms_norm_eps": 1e-05, "rope_theta": 12000000, "tie_word_embeddings": false,
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 21504,
        "vocab_size": 131072, "max_position_embeddings": 65536, "rope_scaling": {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor":
        1.0, "original_max_position_embeddings": 8192, "rope_type": "llama3", "type": "llama3"}}
    """,
    "xlm-roberta-large": """
        {"architectures": ["XLMRobertaForMaskedLM"], "model_type": "xlm-roberta", "hidden_size": 1024, "intermediate_size": 4096,
        "num_attention_heads": 16, "num_hidden_layers": 24, "vocab_size": 250002, "hidden_act": "gelu", "layer_norm_eps": 1e-05,
        "max_position_embeddings": 514, "type_vocab_size": 1}
    """,
    "camembert-base": """
        {"architectures": ["CamembertForMaskedLM"], "model_type": "camembert", "hidden_size": 768, "intermediate_size": 3072,
        "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 32005, "hidden_act": "gelu", "layer_norm_eps": 1e-05,
        "max_position_embeddings": 514, "type_vocab_size": 1}
    """,
    # The models with images have a configuration for each part.
    "gemma3-4b": """
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": {"hidden_size": 2560,
        "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type":
        "linear"}, "sliding_window": 1024}, "vision_config": {"model_type": "siglip_vision_model"}}
    """,
    "gemma3-27b": """
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": {"head_dim": 128, "hidden_size": 5376,
        "intermediate_size": 21504, "model_type": "gemma3_text", "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads":
        16, "query_pre_attn_scalar": 168, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}, "vision_config":
        {"model_type": "siglip_vision_model"}}
    """,
    "qwen3.5-27b": """
        {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": {"attention_bias": false,
        "attn_output_gate": true, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 17408, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
        "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false,
        "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
        "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000,
        "rope_type": "default"}, "tie_word_embeddings": false, "vocab_size": 248320}, "tie_word_embeddings": false, "vision_config": {}}
    """,
    "kimi-linear-48b-a3b": """
        {"architectures": ["KimiLinearForCausalLM"], "first_k_dense_replace": 1, "head_dim": 72, "hidden_act": "silu", "hidden_size": 2304,
        "intermediate_size": 9216, "kv_lora_rank": 512, "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim":
        128, "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26], "num_heads": 32,
        "short_conv_kernel_size": 4}, "mla_use_nope": true, "model_max_length": 1048576, "model_type": "kimi_linear",
        "moe_intermediate_size": 1024, "moe_layer_freq": 1, "moe_renormalize": true, "moe_router_activation_func": "sigmoid",
        "num_attention_heads": 32, "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
        "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "q_lora_rank": null, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0, "routed_scaling_factor": 2.446,
        "tie_word_embeddings": false, "topk_group": 1, "use_grouped_topk": true, "v_head_dim": 128, "vocab_size": 163840}
    """,
    "gemma4-e2b": """
        {"architectures": ["Gemma4ForConditionalGeneration"], "audio_config": {"model_type": "gemma4_audio"}, "model_type": "gemma4",
        "text_config": {"attention_bias": false, "attention_k_eq_v": false, "enable_moe_block": false, "final_logit_softcapping": 30.0,
        "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536,
        "hidden_size_per_layer_input": 256, "intermediate_size": 6144, "layer_types": ["sliding_attention", "sliding_attention",
        "sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "sliding_attention",
        "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention",
        "full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
        "sliding_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
        "sliding_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention",
        "sliding_attention", "sliding_attention", "full_attention"], "max_position_embeddings": 131072, "model_type": "gemma4_text",
        "moe_intermediate_size": null, "num_attention_heads": 8, "num_experts": null, "num_global_key_value_heads": null,
        "num_hidden_layers": 35, "num_key_value_heads": 1, "num_kv_shared_layers": 20, "rms_norm_eps": 1e-06, "rope_parameters":
        {"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"}, "sliding_attention":
        {"rope_theta": 10000.0, "rope_type": "default"}}, "sliding_window": 512, "tie_word_embeddings": true, "top_k_experts": null,
        "use_bidirectional_attention": null, "use_double_wide_mlp": true, "vocab_size": 262144, "vocab_size_per_layer_input": 262144},
        "tie_word_embeddings": true, "vision_config": {"model_type": "gemma4_vision"}}
    """,
    # The same keys without those with the default of the class, and with per_layer_config, which later releases write.
    "gemma4-31b": """
        {"architectures": ["Gemma4ForConditionalGeneration"], "audio_config": null, "model_type": "gemma4", "text_config":
        {"attention_k_eq_v": true, "final_logit_softcapping": 30.0, "hidden_size": 5376, "hidden_size_per_layer_input": 0,
        "intermediate_size": 21504, "max_position_embeddings": 262144, "model_type": "gemma4_text", "num_attention_heads": 32,
        "num_hidden_layers": 60, "num_key_value_heads": 16, "per_layer_config": {"05": {"head_dim": 512, "num_key_value_heads": 4}, "11":
        {"head_dim": 512, "num_key_value_heads": 4}, "17": {"head_dim": 512, "num_key_value_heads": 4}, "23": {"head_dim": 512,
        "num_key_value_heads": 4}, "29": {"head_dim": 512, "num_key_value_heads": 4}, "35": {"head_dim": 512, "num_key_value_heads": 4},
        "41": {"head_dim": 512, "num_key_value_heads": 4}, "47": {"head_dim": 512, "num_key_value_heads": 4}, "53": {"head_dim": 512,
        "num_key_value_heads": 4}, "59": {"head_dim": 512, "num_key_value_heads": 4}}, "sliding_window": 1024,
        "use_bidirectional_attention": "vision"}, "vision_config": {"model_type": "gemma4_vision"}}
    """,
}
#: Files of tests/models/real_configs.py.
MORE = (
    "kimi-k2",
    "qwen3-30b-a3b",
    "olmoe-1b-7b",
    "granite3-8b",
    "olmo3-7b",
    "phi4-14b",
    "mistral-small3-24b",
    "pythia-6.9b",
    "gpt-neox-20b",
    "gemma2-9b",
    "gemma2-27b",
    "minitron-4b",
)


@pytest.mark.parametrize("name", [*RELEASED, *MORE])
def test_a_released_config_json_is_the_shipped_size(name):
    content = json.loads(RELEASED[name]) if name in RELEASED else CONFIGS[name]
    family, mapping = registry.find_mapping(content)
    assert import_model.model_overrides(config_json.read(mapping, family.config, content)) == [f"model={name}"]
