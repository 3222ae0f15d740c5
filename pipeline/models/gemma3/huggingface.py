"""Gemma 3 <-> transformers' Gemma3ForCausalLM, and the language model of Gemma3ForConditionalGeneration, which is imported alone."""

from __future__ import annotations

from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, positive, tensors
from pipeline.models.layer_kinds import layer_types, rope_by_kind
from pipeline.models.llama import huggingface as llama
from pipeline.models.wrapper import Wrapper

#: The models from 4b on. The class ties the head according to its own key, not to that of the language model.
WITH_IMAGES = Wrapper(
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    constants={"tie_word_embeddings": True},
    ignored_keys=(
        *("vision_config", "mm_tokens_per_image", "initializer_range", "boi_token_index", "eoi_token_index", "image_token_index"),
        *("boi_token_id", "eoi_token_id", "image_token_id"),
    ),
    left_out=("vision_tower.*", "multi_modal_projector.*", "model.vision_tower.*", "model.multi_modal_projector.*"),
)
#: of Gemma 2, too
HEAD_DIM = KeyGroup(
    keys=("head_dim",),
    write=lambda config: {"head_dim": config.head_dim},
    read=lambda content: {"head_width": positive("head_dim", content.get("head_dim", 256))},
)
MAPPING = HuggingFaceMapping(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    wrappers=(WITH_IMAGES,),
    fields={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_positions",
        "hidden_size": "hidden",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "intermediate_size": "ffn_hidden",
        "query_pre_attn_scalar": "query_pre_attn_scalar",
        "sliding_window": "window",
        "rms_norm_eps": "norm_eps",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_embeddings",
    },
    constants={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    defaults={
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 9216,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
    nested=(
        rope_by_kind(theta=1e6, local_theta=10000.0, positions=131072, local_key="rope_local_base_freq"),
        HEAD_DIM,
        llama.NO_PADDING,
        layer_types(default=6, interval_key="sliding_window_pattern"),
    ),
    # the class stores attn_logit_softcapping and does not use it
    ignored_keys=("_sliding_window_pattern", "attn_logit_softcapping"),
    table=(
        *tensors("model.embed_tokens", "embed.tokens"),
        *tensors("model.layers.{i}.input_layernorm", "blocks.{i}.attention_norm"),
        *tensors("model.layers.{i}.self_attn.q_proj", "blocks.{i}.attention.query"),
        *tensors("model.layers.{i}.self_attn.k_proj", "blocks.{i}.attention.key"),
        *tensors("model.layers.{i}.self_attn.v_proj", "blocks.{i}.attention.value"),
        *tensors("model.layers.{i}.self_attn.o_proj", "blocks.{i}.attention.output"),
        *llama.NORMS,
        *tensors("model.layers.{i}.post_attention_layernorm", "blocks.{i}.post_attention_norm"),
        *tensors("model.layers.{i}.pre_feedforward_layernorm", "blocks.{i}.mlp_norm"),
        *tensors("model.layers.{i}.mlp.gate_proj", "blocks.{i}.mlp.gate"),
        *tensors("model.layers.{i}.mlp.up_proj", "blocks.{i}.mlp.up"),
        *tensors("model.layers.{i}.mlp.down_proj", "blocks.{i}.mlp.down"),
        *tensors("model.layers.{i}.post_feedforward_layernorm", "blocks.{i}.post_mlp_norm"),
        *tensors("model.norm", "norm"),
        *tensors("lm_head", "head"),
    ),
)
