"""BLOOM <-> transformers' BloomForCausalLM."""

from __future__ import annotations

from typing import Any

from pipeline.models.bloom.config import BloomConfig
from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, positive, refusal, tensors

_BOTH = ("weight", "bias")

#: our field -> the key that the Hugging Face class writes, and another that it reads, which BigScience's files have
_SIZES = {"hidden": ("hidden_size", "n_embed"), "layers": ("n_layer", "num_hidden_layers"), "heads": ("n_head", "num_attention_heads")}
_DEFAULTS = {"hidden": 64, "layers": 2, "heads": 8}


def _write(config: BloomConfig) -> dict[str, Any]:
    return {names[0]: getattr(config, field) for field, names in _SIZES.items()}


def _read(content: dict[str, Any]) -> dict[str, Any]:
    return {field: _size(content, names, _DEFAULTS[field]) for field, names in _SIZES.items()}


def _size(content: dict[str, Any], names: tuple[str, ...], default: int) -> int:
    """Return the size that a key contains, under any of its names."""
    sizes = {name: content[name] for name in names if content.get(name) is not None}
    if len(set(map(str, sizes.values()))) > 1:
        raise refusal(*next(iter(sizes.items())), f"contradicts {sizes}, other names of it", "remove one of them from config.json")
    return positive(*next(iter(sizes.items()))) if sizes else default


def _read_exact(content: dict[str, Any]) -> dict[str, Any]:
    """Verify that the class multiplies whole matrices; the slow variant that sums slices of them leaves out the bias."""
    if content.get("slow_but_exact") and content.get("pretraining_tp", 1) != 1:
        raise refusal("slow_but_exact", content["slow_but_exact"], "is not supported with a pretraining_tp other than 1", "set it to false")
    return {}


MAPPING = HuggingFaceMapping(
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
        *tensors("transformer.word_embeddings", "embed.tokens"),
        *tensors("transformer.word_embeddings_layernorm", "embed.norm", leaves=_BOTH),
        *tensors("transformer.h.{i}.input_layernorm", "blocks.{i}.attention_norm", leaves=_BOTH),
        *tensors(
            "transformer.h.{i}.self_attention.query_key_value",
            "blocks.{i}.attention.query",
            "blocks.{i}.attention.key",
            "blocks.{i}.attention.value",
            leaves=_BOTH,
            interleaved="heads",
        ),
        *tensors("transformer.h.{i}.self_attention.dense", "blocks.{i}.attention.output", leaves=_BOTH),
        *tensors("transformer.h.{i}.post_attention_layernorm", "blocks.{i}.mlp_norm", leaves=_BOTH),
        *tensors("transformer.h.{i}.mlp.dense_h_to_4h", "blocks.{i}.mlp.up", leaves=_BOTH),
        *tensors("transformer.h.{i}.mlp.dense_4h_to_h", "blocks.{i}.mlp.down", leaves=_BOTH),
        *tensors("transformer.ln_f", "norm", leaves=_BOTH),
        *tensors("lm_head", "head"),
    ),
    renamed=((r"^(word_embeddings|word_embeddings_layernorm|h|ln_f)\.", r"transformer.\1."),),
    nested=(
        KeyGroup(tuple(name for names in _SIZES.values() for name in names), _write, _read),
        KeyGroup(("slow_but_exact", "pretraining_tp"), lambda _: {}, _read_exact),
    ),
    # The class has no maximum length; BigScience's files contain it as seq_length.
    defaults={"vocab_size": 250880, "seq_length": 2048, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
)
