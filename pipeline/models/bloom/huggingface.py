"""BLOOM <-> transformers' BloomForCausalLM."""

from __future__ import annotations

from typing import Any

from pipeline.models.adapter import Adapter, KeyGroup, rows
from pipeline.models.bloom.config import BloomConfig

_BOTH = ("weight", "bias")

#: our field -> the key that the Hugging Face class writes, and another that it reads, which BigScience's files have
_SIZES = {"hidden": ("hidden_size", "n_embed"), "layers": ("n_layer", "num_hidden_layers"), "heads": ("n_head", "num_attention_heads")}
_DEFAULTS = {"hidden": 64, "layers": 2, "heads": 8}


def _write(config: BloomConfig) -> dict[str, Any]:
    return {names[0]: getattr(config, field) for field, names in _SIZES.items()}


def _read(content: dict[str, Any]) -> dict[str, Any]:
    found = {field: [content[name] for name in reversed(names) if content.get(name) is not None] for field, names in _SIZES.items()}
    return {field: values[0] if values else _DEFAULTS[field] for field, values in found.items()}


ADAPTER = Adapter(
    architecture="BloomForCausalLM",
    model_type="bloom",
    fields={
        "vocab_size": "vocab_size",
        "seq_length": "max_positions",
        "layer_norm_epsilon": "norm_eps",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_embeddings",
    },
    constants={
        "apply_residual_connection_post_layernorm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    table=(
        *rows("transformer.word_embeddings", "embed.tokens"),
        *rows("transformer.word_embeddings_layernorm", "embed.norm", leaves=_BOTH),
        *rows("transformer.h.{i}.input_layernorm", "blocks.{i}.attention_norm", leaves=_BOTH),
        *rows(
            "transformer.h.{i}.self_attention.query_key_value",
            "blocks.{i}.attention.query",
            "blocks.{i}.attention.key",
            "blocks.{i}.attention.value",
            leaves=_BOTH,
            interleaved="heads",
        ),
        *rows("transformer.h.{i}.self_attention.dense", "blocks.{i}.attention.output", leaves=_BOTH),
        *rows("transformer.h.{i}.post_attention_layernorm", "blocks.{i}.mlp_norm", leaves=_BOTH),
        *rows("transformer.h.{i}.mlp.dense_h_to_4h", "blocks.{i}.mlp.up", leaves=_BOTH),
        *rows("transformer.h.{i}.mlp.dense_4h_to_h", "blocks.{i}.mlp.down", leaves=_BOTH),
        *rows("transformer.ln_f", "norm", leaves=_BOTH),
        *rows("lm_head", "head"),
    ),
    renamed=((r"^(word_embeddings|word_embeddings_layernorm|h|ln_f)\.", r"transformer.\1."),),
    nested=(KeyGroup(tuple(name for names in _SIZES.values() for name in names), _write, _read),),
    # The class has no maximum length; BigScience's files contain it as seq_length.
    defaults={"vocab_size": 250880, "seq_length": 2048, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    # Settings of BigScience's training code.
    ignored_keys=(
        *("slow_but_exact", "skip_bias_add", "skip_bias_add_qkv", "attention_softmax_in_fp32", "bias_dropout_fusion"),
        *("masked_softmax_fusion", "offset_alibi", "n_inner"),
    ),
)
