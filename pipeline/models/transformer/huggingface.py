"""Transformer <-> transformers' MarianMTModel, whose blocks are post-norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from pipeline.layers.positions import SinusoidalPositions
from pipeline.models.config_json_keys import layer_counts
from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, StockTensor, StoredTensors, refusal, tensors
from pipeline.models.transformer.config import TransformerConfig

_BOTH = ("weight", "bias")


def _attention(part: str, hf: str, name: str) -> tuple[StockTensor, ...]:
    """Return the tensors of an attention layer and its norm."""
    hf_layer = f"model.{part}.layers.{{{part}}}.{hf}"
    return (
        *tensors(f"{hf_layer}.k_proj", f"blocks.{{{part}}}.{name}.key", leaves=_BOTH),
        *tensors(f"{hf_layer}.v_proj", f"blocks.{{{part}}}.{name}.value", leaves=_BOTH),
        *tensors(f"{hf_layer}.q_proj", f"blocks.{{{part}}}.{name}.query", leaves=_BOTH),
        *tensors(f"{hf_layer}.out_proj", f"blocks.{{{part}}}.{name}.output", leaves=_BOTH),
        *tensors(f"{hf_layer}_layer_norm", f"blocks.{{{part}}}.{name}_norm", leaves=_BOTH),
    )


def _feed_forward(part: str) -> tuple[StockTensor, ...]:
    """Return the tensors of a feed-forward and its norm."""
    hf_layer = f"model.{part}.layers.{{{part}}}"
    return (
        *tensors(f"{hf_layer}.fc1", f"blocks.{{{part}}}.mlp.up", leaves=_BOTH),
        *tensors(f"{hf_layer}.fc2", f"blocks.{{{part}}}.mlp.down", leaves=_BOTH),
        *tensors(f"{hf_layer}.final_layer_norm", f"blocks.{{{part}}}.mlp_norm", leaves=_BOTH),
    )


def _write_activation(config: TransformerConfig) -> dict[str, Any]:
    return {"activation_function": {"silu": "swish"}.get(config.activation, config.activation)}


def _read_activation(content: dict[str, Any]) -> dict[str, Any]:
    activation = content.get("activation_function", "gelu")
    known = {"relu": "relu", "gelu": "gelu", "swish": "silu", "silu": "silu"}
    if not isinstance(activation, str) or activation not in known:
        raise refusal("activation_function", activation, f"must be one of {', '.join(known)}")
    return {"activation": known[activation]}


def _with_output_bias(config: TransformerConfig, stored: StoredTensors) -> TransformerConfig:
    """Every file has a bias of the logits; it is all zeros in a model that was trained without."""
    return replace(config, output_bias="final_logits_bias" in stored.names() and bool(stored.tensor("final_logits_bias").any()))


def _positions(config: TransformerConfig) -> Tensor:
    """Return the sinusoidal position embeddings, (positions, hidden)."""
    return SinusoidalPositions(config.max_positions, config.hidden).table


MAPPING = HuggingFaceMapping(
    architecture="MarianMTModel",
    model_type="marian",
    fields={
        "vocab_size": "vocab_size",
        "decoder_vocab_size": "vocab_size",
        "max_position_embeddings": "max_positions",
        "d_model": "hidden",
        "encoder_attention_heads": "heads",
        "decoder_attention_heads": "heads",
        "encoder_ffn_dim": "ffn_hidden",
        "decoder_ffn_dim": "ffn_hidden",
        "tie_word_embeddings": "tie_embeddings",
    },
    constants={
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": True,
        "is_encoder_decoder": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
    },
    implied={"norm_eps": 1e-5},
    defaults={
        "vocab_size": 58101,
        "decoder_vocab_size": lambda content: content.get("vocab_size", 58101),
        "max_position_embeddings": 1024,
        "d_model": 1024,
        "encoder_attention_heads": 16,
        "decoder_attention_heads": 16,
        "encoder_ffn_dim": 4096,
        "decoder_ffn_dim": 4096,
        "tie_word_embeddings": True,
        "scale_embedding": False,
        "share_encoder_decoder_embeddings": True,
    },
    nested=(
        layer_counts("encoder_layers", "decoder_layers", default=12),
        KeyGroup(("activation_function",), _write_activation, _read_activation),
    ),
    copies={f"model.{part}.embed_tokens.weight": "model.shared.weight" for part in ("encoder", "decoder")},
    zero_weights=("final_logits_bias",),
    computed_weights={f"model.{part}.embed_positions.weight": _positions for part in ("encoder", "decoder")},
    from_weights=_with_output_bias,
    table=lambda config: (
        *tensors("model.shared", "embed.tokens"),
        *_attention("encoder", "self_attn", "attention"),
        *_feed_forward("encoder"),
        *_attention("decoder", "self_attn", "attention"),
        *_attention("decoder", "encoder_attn", "cross"),
        *_feed_forward("decoder"),
        *tensors("lm_head", "head"),
        *((StockTensor("final_logits_bias", ("head.bias",), added_dim=True),) if config.output_bias else ()),
    ),
)
