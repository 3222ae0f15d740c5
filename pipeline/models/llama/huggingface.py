"""Llama <-> transformers' LlamaForCausalLM; with qkv_bias Qwen2ForCausalLM, with query_key_norm Qwen3ForCausalLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipeline.models.config_json_keys import ROPE
from pipeline.models.huggingface_mapping import BlockTensors, HuggingFaceMapping, KeyGroup, StockTensor, positive, refusal, tensors
from pipeline.models.llama.config import LlamaConfig

#: without norms of queries and keys, and without biases
TABLE = (
    *tensors("model.embed_tokens", "embed.tokens"),
    *tensors("model.layers.{i}.input_layernorm", "blocks.{i}.attention_norm"),
    *tensors("model.layers.{i}.self_attn.q_proj", "blocks.{i}.attention.query"),
    *tensors("model.layers.{i}.self_attn.k_proj", "blocks.{i}.attention.key"),
    *tensors("model.layers.{i}.self_attn.v_proj", "blocks.{i}.attention.value"),
    *tensors("model.layers.{i}.self_attn.o_proj", "blocks.{i}.attention.output"),
    *tensors("model.layers.{i}.post_attention_layernorm", "blocks.{i}.mlp_norm"),
    *tensors("model.layers.{i}.mlp.gate_proj", "blocks.{i}.mlp.gate"),
    *tensors("model.layers.{i}.mlp.up_proj", "blocks.{i}.mlp.up"),
    *tensors("model.layers.{i}.mlp.down_proj", "blocks.{i}.mlp.down"),
    *tensors("model.norm", "norm"),
    *tensors("lm_head", "head"),
)
#: the tensors of the blocks without those of the feed-forward
ATTENTION = tuple(entry for entry in TABLE if entry.blocks and ".mlp." not in entry.hf_name)
NORMS = (
    *tensors("model.layers.{i}.self_attn.q_norm", "blocks.{i}.attention.query_norm"),
    *tensors("model.layers.{i}.self_attn.k_norm", "blocks.{i}.attention.key_norm"),
)
_QKV_BIASES = tuple(
    StockTensor(f"model.layers.{{i}}.self_attn.{hf}_proj.bias", (f"blocks.{{i}}.attention.{name}.bias",))
    for hf, name in (("q", "query"), ("k", "key"), ("v", "value"))
)
_BIASES = (*_QKV_BIASES, *tensors("model.layers.{i}.self_attn.o_proj", "blocks.{i}.attention.output", leaves=("bias",)))


def _table(config: LlamaConfig) -> tuple[StockTensor | BlockTensors, ...]:
    biases = _BIASES if config.attention_bias else _QKV_BIASES if config.qkv_bias else ()
    return (*TABLE, *(NORMS if config.query_key_norm else ()), *biases)


def kv_heads(missing: int, heads: int) -> Callable[[dict[str, Any]], int]:
    """Return the default of num_key_value_heads: `missing` without the key, the number of heads (by default `heads`) if it is null."""
    return lambda content: content.get("num_attention_heads", heads) if "num_key_value_heads" in content else missing


def _read_head_dim(content: dict[str, Any]) -> dict[str, Any]:
    """Return head_width, None if it is hidden / heads."""
    width, derived = content.get("head_dim"), content.get("hidden_size", 4096) / content.get("num_attention_heads", 32)
    return {"head_width": None if width in (None, derived) else positive("head_dim", width)}


def _read_layer_types(content: dict[str, Any]) -> dict[str, Any]:
    """Verify that every layer has full attention."""
    kinds = content.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or {*map(str, kinds)} != {"full_attention"}):
        raise refusal("layer_types", kinds, "is not supported by this family; only full_attention is supported")
    return {}


FULL_ATTENTION = KeyGroup(("layer_types",), lambda _: {}, _read_layer_types)
#: For classes whose default padding token may be a text token, or outside the vocabulary; padding does not affect the logits.
NO_PADDING = KeyGroup(keys=("pad_token_id",), write=lambda config: {"pad_token_id": None}, read=lambda content: {})  # noqa: ARG005

HEAD_DIM = KeyGroup(keys=("head_dim",), write=lambda config: {"head_dim": config.head_dim}, read=_read_head_dim)

MAPPING = HuggingFaceMapping(
    architecture="LlamaForCausalLM",
    model_type="llama",
    fields={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_positions",
        "hidden_size": "hidden",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads",
        "intermediate_size": "ffn_hidden",
        "rms_norm_eps": "norm_eps",
        "attention_bias": "attention_bias",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_embeddings",
    },
    constants={"hidden_act": "silu", "mlp_bias": False, "attention_dropout": 0.0},
    defaults={
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": lambda content: content.get("num_attention_heads", 32),
        "intermediate_size": 11008,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    },
    nested=(ROPE, HEAD_DIM),
    implied={"query_key_norm": False, "qkv_bias": False, "no_rope_layer_interval": None},
    table=_table,
)
QWEN3 = replace(
    MAPPING,
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    constants={"hidden_act": "silu", "attention_dropout": 0.0, "use_sliding_window": False},
    defaults={
        **MAPPING.defaults,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "max_position_embeddings": 32768,
        "num_key_value_heads": kv_heads(32, 32),
    },
    # head_dim is 128 if the key is missing
    nested=(ROPE, replace(HEAD_DIM, read=lambda content: _read_head_dim({"head_dim": 128, **content})), FULL_ATTENTION),
    ignored_keys=("sliding_window", "max_window_layers"),  # off, since use_sliding_window is false
    implied={"query_key_norm": True, "qkv_bias": False, "no_rope_layer_interval": None},
)
#: Qwen 2 and 2.5; without a key head_dim, it is hidden / heads
QWEN2 = replace(
    QWEN3,
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    fields={key: field for key, field in MAPPING.fields.items() if key != "attention_bias"},
    defaults={key: default for key, default in QWEN3.defaults.items() if key != "attention_bias"},
    nested=(ROPE, HEAD_DIM, FULL_ATTENTION),
    implied={"query_key_norm": False, "qkv_bias": True, "attention_bias": False, "no_rope_layer_interval": None},
)
MAPPINGS = (MAPPING, QWEN2, QWEN3)
