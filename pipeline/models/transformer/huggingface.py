"""Transformer <-> transformers' MarianMTModel, whose blocks are post-norm."""

from __future__ import annotations

from typing import Any

from pipeline.models.adapter import Adapter, Nested, Row, refusal, rows
from pipeline.models.encoder_decoder import depths
from pipeline.models.transformer.config import TransformerConfig

_BOTH = ("weight", "bias")


def _attention(part: str, theirs: str, ours: str) -> tuple[Row, ...]:
    """An attention layer and its norm."""
    stock = f"model.{part}.layers.{{{part}}}.{theirs}"
    return (
        *rows(f"{stock}.k_proj", f"blocks.{{{part}}}.{ours}.key", leaves=_BOTH),
        *rows(f"{stock}.v_proj", f"blocks.{{{part}}}.{ours}.value", leaves=_BOTH),
        *rows(f"{stock}.q_proj", f"blocks.{{{part}}}.{ours}.query", leaves=_BOTH),
        *rows(f"{stock}.out_proj", f"blocks.{{{part}}}.{ours}.output", leaves=_BOTH),
        *rows(f"{stock}_layer_norm", f"blocks.{{{part}}}.{ours}_norm", leaves=_BOTH),
    )


def _feed_forward(part: str) -> tuple[Row, ...]:
    """A feed-forward and its norm."""
    stock = f"model.{part}.layers.{{{part}}}"
    return (
        *rows(f"{stock}.fc1", f"blocks.{{{part}}}.mlp.up", leaves=_BOTH),
        *rows(f"{stock}.fc2", f"blocks.{{{part}}}.mlp.down", leaves=_BOTH),
        *rows(f"{stock}.final_layer_norm", f"blocks.{{{part}}}.mlp_norm", leaves=_BOTH),
    )


def _write_activation(config: TransformerConfig) -> dict[str, Any]:
    return {"activation_function": {"silu": "swish"}.get(config.activation, config.activation)}


def _read_activation(content: dict[str, Any]) -> dict[str, Any]:
    theirs = content.get("activation_function", "gelu")
    known = {"relu": "relu", "gelu": "gelu", "swish": "silu", "silu": "silu"}
    if theirs not in known:
        raise refusal("activation_function", theirs, f"must be one of {', '.join(known)}")
    return {"activation": known[theirs]}


ADAPTER = Adapter(
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
    nested=(depths("encoder_layers", "decoder_layers", default=12), Nested(("activation_function",), _write_activation, _read_activation)),
    harmless=("init_std", "is_decoder", "num_hidden_layers"),
    copies={f"model.{part}.embed_tokens.weight": "model.shared.weight" for part in ("encoder", "decoder")},
    zeros=("final_logits_bias",),
    unused=("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"),  # sines and cosines, computed
    table=(
        *rows("model.shared", "embed.tokens"),
        *_attention("encoder", "self_attn", "attention"),
        *_feed_forward("encoder"),
        *_attention("decoder", "self_attn", "attention"),
        *_attention("decoder", "encoder_attn", "cross"),
        *_feed_forward("decoder"),
        *rows("lm_head", "head"),
    ),
)
