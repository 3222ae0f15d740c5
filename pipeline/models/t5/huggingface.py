"""T5 <-> transformers' T5ForConditionalGeneration."""

from __future__ import annotations

from typing import Any

from pipeline.models.adapter import Adapter, Nested, Row, refusal, rows
from pipeline.models.encoder_decoder import depths
from pipeline.models.t5.config import T5Config

#: The feed-forwards of T5 and T5 1.1, as config.json names them.
_PLAIN, _GATED = "relu", "gated-gelu"


def _read_feed_forward(content: dict[str, Any]) -> dict[str, Any]:
    """Which of the two it is."""
    found = content.get("feed_forward_proj", _PLAIN)
    if found not in (_PLAIN, _GATED):
        raise refusal("feed_forward_proj", found, f"is nothing this family has; {_PLAIN} and {_GATED} are all it knows")
    return {"gated": found == _GATED}


def _write_tie(config: T5Config) -> dict[str, Any]:
    return {"tie_word_embeddings": config.tie_embeddings, "scale_decoder_outputs": config.tie_embeddings}


def _read_tie(content: dict[str, Any]) -> dict[str, Any]:
    """Newer releases say that embedding and head are tied even where they are not; the scaling of the head's input tells."""
    return {"tie_embeddings": content.get("scale_decoder_outputs", content.get("tie_word_embeddings", True))}


def _attention(part: str, layer: int, theirs: str, ours: str) -> tuple[Row, ...]:
    """An attention layer and its norm, in every block of the encoder or the decoder."""
    stock, block = f"{part}.block.{{{part}}}.layer.{layer}", f"blocks.{{{part}}}"
    return (
        *rows(f"{stock}.{theirs}.q", f"{block}.{ours}.query"),
        *rows(f"{stock}.{theirs}.k", f"{block}.{ours}.key"),
        *rows(f"{stock}.{theirs}.v", f"{block}.{ours}.value"),
        *rows(f"{stock}.{theirs}.o", f"{block}.{ours}.output"),
        *rows(f"{stock}.layer_norm", f"{block}.{ours}_norm"),
    )


def _feed_forward(part: str, layer: int, *, gated: bool) -> tuple[Row, ...]:
    """A feed-forward and its norm; T5 1.1 has two matrices at the input."""
    stock, block = f"{part}.block.{{{part}}}.layer.{layer}", f"blocks.{{{part}}}"
    inputs = {"wi_0": "gate", "wi_1": "up"} if gated else {"wi": "up"}
    return (
        *(row for theirs, ours in inputs.items() for row in rows(f"{stock}.DenseReluDense.{theirs}", f"{block}.mlp.{ours}")),
        *rows(f"{stock}.DenseReluDense.wo", f"{block}.mlp.down"),
        *rows(f"{stock}.layer_norm", f"{block}.mlp_norm"),
    )


def _bias(part: str) -> tuple[Row, ...]:
    """The biases of distances, which stock keeps in the first block."""
    return rows(f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias", f"{part}_bias", transposed=True)


def _table(config: T5Config) -> tuple[Row, ...]:
    """Every weight."""
    return (
        *rows("shared", "embed.tokens"),
        *_bias("encoder"),
        *_attention("encoder", 0, "SelfAttention", "attention"),
        *_feed_forward("encoder", 1, gated=config.gated),
        *rows("encoder.final_layer_norm", f"blocks.{config.encoder_blocks - 1}.output_norm"),
        *_bias("decoder"),
        *_attention("decoder", 0, "SelfAttention", "attention"),
        *_attention("decoder", 1, "EncDecAttention", "cross"),
        *_feed_forward("decoder", 2, gated=config.gated),
        *rows("decoder.final_layer_norm", "norm"),
        *rows("lm_head", "head"),
    )


ADAPTER = Adapter(
    architecture="T5ForConditionalGeneration",
    model_type="t5",
    fields={
        "vocab_size": "vocab_size",
        "n_positions": "max_positions",
        "d_model": "hidden",
        "d_kv": "head_width",
        "d_ff": "ffn_hidden",
        "num_heads": "heads",
        "relative_attention_num_buckets": "buckets",
        "relative_attention_max_distance": "max_distance",
        "layer_norm_epsilon": "norm_eps",
        "initializer_factor": "init_std",
    },
    constants={"is_encoder_decoder": True, "dropout_rate": 0.0},
    defaults={
        "vocab_size": 32128,
        "n_positions": 512,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_heads": 8,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "initializer_factor": 1.0,
    },
    nested=(
        depths("num_layers", "num_decoder_layers", default=6, alike=True),
        Nested(("feed_forward_proj",), lambda config: {"feed_forward_proj": _GATED if config.gated else _PLAIN}, _read_feed_forward),
        Nested(("tie_word_embeddings", "scale_decoder_outputs"), _write_tie, _read_tie),
    ),
    harmless=("dense_act_fn", "is_gated_act", "is_decoder"),  # what newer releases write beside those
    older=("T5WithLMHeadModel",),
    copies={f"{part}.embed_tokens.weight": "shared.weight" for part in ("encoder", "decoder")},
    stand_ins={"lm_head.weight": "shared.weight"},
    unused=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    table=_table,
)
