"""T5 <-> transformers' T5ForConditionalGeneration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.models.config_json_keys import layer_counts
from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, StockTensor, StoredTensors, refusal, tensors
from pipeline.models.t5.config import T5Config

#: feed_forward_proj of T5 and of T5 1.1 in config.json
_PLAIN, _GATED = "relu", "gated-gelu"
#: names of the embedding in files
_EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def _read_feed_forward(content: dict[str, Any]) -> dict[str, Any]:
    """Return whether the feed-forward is gated."""
    kind = content.get("feed_forward_proj", _PLAIN)
    if kind not in (_PLAIN, _GATED):
        raise refusal("feed_forward_proj", kind, f"is not supported by this family; only {_PLAIN} and {_GATED} are supported")
    derived = {"dense_act_fn": "gelu_new" if kind == _GATED else _PLAIN, "is_gated_act": kind == _GATED}
    for key, expected in derived.items():  # the class derives them, and a file can override them
        if content.get(key, expected) != expected:
            raise refusal(key, content[key], f"contradicts feed_forward_proj={kind}, which means {expected}", f"remove {key}")
    return {"gated": kind == _GATED}


def _write_tie(config: T5Config) -> dict[str, Any]:
    return {"tie_word_embeddings": config.tie_embeddings, "scale_decoder_outputs": config.head_factor != 1}


def _read_tie(content: dict[str, Any]) -> dict[str, Any]:
    """Return whether the head is tied, and whether its input is scaled, if the two differ.

    scale_decoder_outputs states the second. Without it, tie_word_embeddings states both, and null is true. Releases that write
    scale_decoder_outputs set tie_word_embeddings even for untied models; only the tensors tell (`_tied_by_the_files`).
    """
    tied = content.get("tie_word_embeddings") is not False
    scaled = content.get("scale_decoder_outputs", tied)
    if not isinstance(scaled, bool):
        raise refusal("scale_decoder_outputs", scaled, "must be of type bool", "fix config.json")
    return {"tie_embeddings": scaled}


def _tied_by_the_files(config: T5Config, stored: StoredTensors) -> T5Config:
    """Tie a head that is not scaled if the files have one tensor for head and embedding, as the class does."""
    names = set(stored.names())
    if config.tie_embeddings or ("lm_head.weight" in names and not names.isdisjoint(_EMBEDDINGS)):
        return config
    return replace(config, tie_embeddings=True, scale_head=False)


def _attention(part: str, layer: int, hf: str, name: str) -> tuple[StockTensor, ...]:
    """Return the tensors of an attention layer and its norm, in every block of the encoder or the decoder."""
    hf_layer, block = f"{part}.block.{{{part}}}.layer.{layer}", f"blocks.{{{part}}}"
    return (
        *tensors(f"{hf_layer}.{hf}.q", f"{block}.{name}.query"),
        *tensors(f"{hf_layer}.{hf}.k", f"{block}.{name}.key"),
        *tensors(f"{hf_layer}.{hf}.v", f"{block}.{name}.value"),
        *tensors(f"{hf_layer}.{hf}.o", f"{block}.{name}.output"),
        *tensors(f"{hf_layer}.layer_norm", f"{block}.{name}_norm"),
    )


def _feed_forward(part: str, layer: int, *, gated: bool) -> tuple[StockTensor, ...]:
    """Return the tensors of a feed-forward and its norm; T5 1.1 has two input projections."""
    hf_layer, block = f"{part}.block.{{{part}}}.layer.{layer}", f"blocks.{{{part}}}"
    inputs = {"wi_0": "gate", "wi_1": "up"} if gated else {"wi": "up"}
    return (
        *(entry for hf, name in inputs.items() for entry in tensors(f"{hf_layer}.DenseReluDense.{hf}", f"{block}.mlp.{name}")),
        *tensors(f"{hf_layer}.DenseReluDense.wo", f"{block}.mlp.down"),
        *tensors(f"{hf_layer}.layer_norm", f"{block}.mlp_norm"),
    )


def _bias(part: str) -> tuple[StockTensor, ...]:
    """Return the tensors of the relative position biases, which Hugging Face stores in the first block."""
    return tensors(f"{part}.block.0.layer.0.SelfAttention.relative_attention_bias", f"{part}_bias", transposed=True)


def _table(config: T5Config) -> tuple[StockTensor, ...]:
    """Return the tensors of all weights."""
    return (
        *tensors("shared", "embed.tokens"),
        *_bias("encoder"),
        *_attention("encoder", 0, "SelfAttention", "attention"),
        *_feed_forward("encoder", 1, gated=config.gated),
        *tensors("encoder.final_layer_norm", f"blocks.{config.encoder_blocks - 1}.output_norm"),
        *_bias("decoder"),
        *_attention("decoder", 0, "SelfAttention", "attention"),
        *_attention("decoder", 1, "EncDecAttention", "cross"),
        *_feed_forward("decoder", 2, gated=config.gated),
        *tensors("decoder.final_layer_norm", "norm"),
        *tensors("lm_head", "head"),
    )


MAPPING = HuggingFaceMapping(
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
        layer_counts("num_layers", "num_decoder_layers", default=6, decoder_as_encoder=True),
        KeyGroup(
            ("feed_forward_proj", "dense_act_fn", "is_gated_act"),
            lambda config: {"feed_forward_proj": _GATED if config.gated else _PLAIN},
            _read_feed_forward,
        ),
        KeyGroup(("tie_word_embeddings", "scale_decoder_outputs"), _write_tie, _read_tie),
    ),
    ignored_keys=("is_decoder",),  # the class sets it for each part
    legacy_architectures=("T5WithLMHeadModel",),
    copies=dict.fromkeys(_EMBEDDINGS[1:], _EMBEDDINGS[0]),
    from_weights=_tied_by_the_files,
    ignored_weights=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    table=_table,
)
