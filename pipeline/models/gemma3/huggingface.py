"""Gemma 3 <-> transformers' Gemma3ForCausalLM, the class of the models without images."""

from __future__ import annotations

from typing import Any

from pipeline.models.config_json_keys import ROPE, as_object, interval_of, number
from pipeline.models.gemma3.config import Gemma3Config
from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, positive, refusal, tensors
from pipeline.models.llama import huggingface as llama
from pipeline.models.shared_sizes import marked

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def _write_layers(config: Gemma3Config) -> dict[str, Any]:
    """Return the interval of the global layers, and the kind of each layer."""
    kinds = [_GLOBAL if is_global else _LOCAL for is_global in marked(config.layers, config.sliding_window_pattern)]
    return {"sliding_window_pattern": config.sliding_window_pattern, "layer_types": kinds}


def _read_layers(content: dict[str, Any]) -> dict[str, Any]:
    """Return sliding_window_pattern; the list takes precedence, as in the class."""
    interval, kinds = content.get("sliding_window_pattern", 6), content.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and all(kind in (_LOCAL, _GLOBAL) for kind in kinds)):
        raise refusal("layer_types", kinds, f"must be a list of {_LOCAL} and {_GLOBAL}")
    return {"sliding_window_pattern": interval if kinds is None else interval_of("layer_types", kinds, _GLOBAL, interval)}


def _write_rope(config: Gemma3Config) -> dict[str, Any]:
    """Return the current keys, by kind of layer, and those of earlier releases."""
    of_global = ROPE.write(config)
    parameters = {_GLOBAL: of_global["rope_parameters"], _LOCAL: {"rope_type": "default", "rope_theta": config.rope_local_theta}}
    return {**of_global, "rope_parameters": parameters, "rope_local_base_freq": config.rope_local_theta}


def _read_rope(content: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary fields.

    Raises:
        UserError: an unsupported kind of scaling, a scaling of the local layers, or parameters without the kind of layer.
    """
    parameters = as_object("rope_parameters", content.get("rope_parameters"))
    for key in parameters.keys() - {_LOCAL, _GLOBAL}:
        raise refusal(f"rope_parameters.{key}", parameters[key], f"must be {_LOCAL} or {_GLOBAL}, the kind of layer", "fix config.json")
    local, of_global = (
        {"rope_type": "default", **as_object(f"rope_parameters.{kind}", parameters.get(kind))} for kind in (_LOCAL, _GLOBAL)
    )
    if local["rope_type"] != "default":
        raise refusal(f"rope_parameters.{_LOCAL}.rope_type", local["rope_type"], "is not supported by this family; only default is")
    of_global = {"rope_theta": content.get("rope_theta", 1e6), **of_global, **as_object("rope_scaling", content.get("rope_scaling"))}
    fields = ROPE.read({"rope_parameters": of_global, "max_position_embeddings": content.get("max_position_embeddings", 131072)})
    local_theta = local.get("rope_theta", content.get("rope_local_base_freq", 10000.0))
    return {**fields, "rope_local_theta": number(f"rope_parameters.{_LOCAL}.rope_theta", local_theta)}


MAPPING = HuggingFaceMapping(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
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
        KeyGroup(keys=("rope_theta", "rope_parameters", "rope_scaling", "rope_local_base_freq"), write=_write_rope, read=_read_rope),
        KeyGroup(
            keys=("head_dim",),
            write=lambda config: {"head_dim": config.head_dim},
            read=lambda content: {"head_width": positive("head_dim", content.get("head_dim", 256))},
        ),
        llama.NO_PADDING,
        KeyGroup(keys=("sliding_window_pattern", "layer_types"), write=_write_layers, read=_read_layers),
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
