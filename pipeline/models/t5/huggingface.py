"""T5 <-> transformers' T5ForConditionalGeneration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pipeline.models.adapter import Adapter, Blocks, Nested, Row, refusal, rows
from pipeline.models.encoder_decoder import decoder, depths, encoder
from pipeline.models.t5.config import T5Config

Where = Callable[[T5Config], Iterator[tuple[int, int]]]

#: The feed-forwards of T5 and T5 1.1, as config.json names them.
_PLAIN, _GATED = "relu", "gated-gelu"


def _read_feed_forward(content: dict[str, Any]) -> dict[str, Any]:
    """Which of the two it is."""
    found = content.get("feed_forward_proj", _PLAIN)
    if found not in (_PLAIN, _GATED):
        raise refusal("feed_forward_proj", found, f"is nothing this family has; {_PLAIN} and {_GATED} are all it knows")
    return {"gated": found == _GATED}


def _last_encoder_block(config: T5Config) -> Iterator[tuple[int, int]]:
    """The block whose output is the encoder's."""
    yield 0, config.encoder_blocks - 1


def _attention(layer: str, theirs: str, ours: str) -> tuple[Row, ...]:
    """An attention layer and its norm."""
    return (
        *rows(f"{layer}.{theirs}.q", f"blocks.{{i}}.{ours}.query"),
        *rows(f"{layer}.{theirs}.k", f"blocks.{{i}}.{ours}.key"),
        *rows(f"{layer}.{theirs}.v", f"blocks.{{i}}.{ours}.value"),
        *rows(f"{layer}.{theirs}.o", f"blocks.{{i}}.{ours}.output"),
        *rows(f"{layer}.layer_norm", f"blocks.{{i}}.{ours}_norm"),
    )


def _feed_forward(layer: str, where: Where) -> tuple[Blocks, ...]:
    """A feed-forward and its norm; T5 1.1 has two matrices at the input."""
    stock, plain = f"{layer}.DenseReluDense", rows(f"{layer}.DenseReluDense.wi", "blocks.{i}.mlp.up")
    gated = (*rows(f"{stock}.wi_0", "blocks.{i}.mlp.gate"), *rows(f"{stock}.wi_1", "blocks.{i}.mlp.up"))
    common = (*rows(f"{stock}.wo", "blocks.{i}.mlp.down"), *rows(f"{layer}.layer_norm", "blocks.{i}.mlp_norm"))
    return (
        Blocks(plain, where=lambda config: () if config.gated else where(config)),
        Blocks(gated, where=lambda config: where(config) if config.gated else ()),
        Blocks(common, where=where),
    )


def _bias(part: str) -> tuple[Row, ...]:
    """The biases of distances, which stock keeps in the first block."""
    return rows(f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias", f"{part}_bias", transposed=True)


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
        "tie_word_embeddings": "tie_embeddings",
    },
    constants={"is_encoder_decoder": True, "dropout_rate": 0.0},
    defaults={
        "n_positions": 512,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "initializer_factor": 1.0,
        "tie_word_embeddings": True,
    },
    nested=(
        depths("num_layers", "num_decoder_layers", decoder_default=True),
        Nested(("feed_forward_proj",), lambda config: {"feed_forward_proj": _GATED if config.gated else _PLAIN}, _read_feed_forward),
    ),
    harmless=("dense_act_fn", "is_gated_act", "scale_decoder_outputs", "is_decoder"),  # what newer releases write beside those
    older=("T5WithLMHeadModel",),
    copies={f"{part}.embed_tokens.weight": "shared.weight" for part in ("encoder", "decoder")},
    unused=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    table=(
        *rows("shared", "embed.tokens"),
        *_bias("encoder"),
        Blocks(_attention("encoder.block.{i}.layer.0", "SelfAttention", "attention"), where=encoder),
        *_feed_forward("encoder.block.{i}.layer.1", encoder),
        Blocks(rows("encoder.final_layer_norm", "blocks.{i}.output_norm"), where=_last_encoder_block),
        *_bias("decoder"),
        Blocks(_attention("decoder.block.{i}.layer.0", "SelfAttention", "attention"), where=decoder),
        Blocks(_attention("decoder.block.{i}.layer.1", "EncDecAttention", "cross"), where=decoder),
        *_feed_forward("decoder.block.{i}.layer.2", decoder),
        *rows("decoder.final_layer_norm", "norm"),
        *rows("lm_head", "head"),
    ),
)
