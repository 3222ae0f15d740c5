"""GPT-NeoX <-> transformers' GPTNeoXForCausalLM, whose queries, keys and values are one tensor, head by head."""

from __future__ import annotations

from typing import Any

from pipeline.models.config_json_keys import partial_rope
from pipeline.models.gpt_neox.config import GPTNeoXConfig
from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, Table, refusal, tensors

_BOTH = ("weight", "bias")

#: hidden_act -> our name; the first one with it is exported. The last three are the same function.
_ACTIVATIONS = {"gelu": "gelu", "gelu_fast": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def _write_activation(config: GPTNeoXConfig) -> dict[str, Any]:
    return {"hidden_act": next(key for key, name in _ACTIVATIONS.items() if name == config.activation)}


def _read_activation(content: dict[str, Any]) -> dict[str, Any]:
    given = content.get("hidden_act", "gelu")
    if not isinstance(given, str) or given not in _ACTIVATIONS:
        raise refusal("hidden_act", given, f"is not supported by this family; supported are {', '.join(_ACTIVATIONS)}")
    return {"activation": _ACTIVATIONS[given]}


def table(config: GPTNeoXConfig) -> Table:
    """Return the tensors of all weights."""
    block, ours = "gpt_neox.layers.{i}", "blocks.{i}"
    leaves = _BOTH if config.attention_bias else ("weight",)
    queries = (f"{ours}.attention.{name}" for name in ("query", "key", "value"))
    return (
        *tensors("gpt_neox.embed_in", "embed.tokens"),
        *tensors(f"{block}.input_layernorm", f"{ours}.attention_norm", leaves=_BOTH),
        *tensors(f"{block}.post_attention_layernorm", f"{ours}.mlp_norm", leaves=_BOTH),
        *tensors(f"{block}.attention.query_key_value", *queries, leaves=leaves, interleaved="heads"),
        *tensors(f"{block}.attention.dense", f"{ours}.attention.output", leaves=leaves),
        *tensors(f"{block}.mlp.dense_h_to_4h", f"{ours}.mlp.up", leaves=_BOTH),
        *tensors(f"{block}.mlp.dense_4h_to_h", f"{ours}.mlp.down", leaves=_BOTH),
        *tensors("gpt_neox.final_layer_norm", "norm", leaves=_BOTH),
        *tensors("embed_out", "head"),
    )


MAPPING = HuggingFaceMapping(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    fields={
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_positions",
        "hidden_size": "hidden",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "intermediate_size": "ffn_hidden",
        "use_parallel_residual": "parallel_residual",
        "attention_bias": "attention_bias",
        "layer_norm_eps": "norm_eps",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_embeddings",
    },
    constants={"attention_dropout": 0.0, "hidden_dropout": 0.0},
    defaults={
        "vocab_size": 50432,
        "max_position_embeddings": 2048,
        "hidden_size": 6144,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "intermediate_size": 24576,
        "use_parallel_residual": True,
        "attention_bias": True,
        "layer_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
    },
    nested=(
        partial_rope(share=0.25, theta_key="rotary_emb_base", share_key="rotary_pct"),
        KeyGroup(("hidden_act",), _write_activation, _read_activation),
    ),
    table=table,
    renamed=((r"^lm_head\.", "embed_out."),),  # the name in the code of transformers 5, which writes files with the other one
    ignored_weights=(
        *("gpt_neox.layers.*.attention.bias", "gpt_neox.layers.*.attention.masked_bias"),
        "gpt_neox.layers.*.attention.rotary_emb.inv_freq",
    ),
)
