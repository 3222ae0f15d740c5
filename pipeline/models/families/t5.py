"""T5 (Raffel et al. 2020, https://arxiv.org/abs/1910.10683) and its version 1.1."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.config_json_keys import layer_counts
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, StockTensor, StoredTensors, refusal, tensors
from pipeline.models.shared_sizes import EncoderDecoderSizes


@dataclass(frozen=True)
class T5Config(EncoderDecoderSizes, family="t5"):
    """Encoder-decoder with RMSNorm and relative position biases, no other biases; T5 1.1 has gated feed-forwards and an untied head."""

    head_width: int = knob(64, "width of a head; heads x head_width may differ from hidden", at_least=1)
    gated: bool = knob(False, "feed-forward gated with GELU (T5 1.1); false for ReLU without gate")
    buckets: int = knob(32, "buckets of the relative position biases", at_least=4)
    max_distance: int = knob(128, "distance from which all positions share the last bucket", unit="tokens", at_least=2)
    norm_eps: float = knob(1e-6, "added to the mean square in RMSNorm", above=0, at_most=0.1)
    scale_head: bool | None = knob(None, "scale the head's input by hidden^-1/2; if the embeddings are tied when null")

    @property
    def head_factor(self) -> float:
        """Factor of the head's input."""
        scaled = self.tie_embeddings if self.scale_head is None else self.scale_head
        return float(self.hidden**-0.5) if scaled else 1.0

    @property
    def objective(self) -> str:
        """Training objective: span corruption."""
        return "span_corruption"

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.head_width

    def reused_weights(self, blocks: range, *, last: bool) -> str | None:  # noqa: ARG002 - see config/rules/parallel.py
        """Return which weights a pipeline stage with these blocks uses at several depths: the biases of a kind of block; None for none."""
        encoder = sum(block < self.encoder_blocks for block in blocks)
        for kind, count in (("encoder", encoder), ("decoder", len(blocks) - encoder)):
            if count > 1:
                return f"the relative position biases of {count} {kind} blocks"
        return None

    def violations(self) -> list[Violation]:
        """See Sizes."""
        violations = super().violations()
        if self.buckets % 4:
            rule = "must be a multiple of 4: two directions, with exact and logarithmic buckets"
            violations.append(Violation("model.buckets", self.buckets, rule, "choose one"))
        elif self.max_distance <= self.buckets // 2:
            rule = f"must be above {self.buckets // 2}, the number of exact buckets of model.buckets={self.buckets}"
            violations.append(Violation("model.max_distance", self.max_distance, rule, "raise it, or choose fewer buckets"))
        return violations


def _build(config: T5Config) -> Model:
    from torch import nn

    from pipeline.layers.attention import Attention
    from pipeline.layers.embedding import Embedding, OutputHead
    from pipeline.layers.encoder_decoder import EncoderDecoder
    from pipeline.layers.mlp import MLP, GatedMLP
    from pipeline.layers.position_bias import RelativeBias
    from pipeline.layers.stack import Block

    def norm() -> nn.RMSNorm:
        return nn.RMSNorm(config.hidden, eps=config.norm_eps)

    def attention() -> Attention:
        return Attention(config.hidden, config.heads, config.heads, config.head_width, bias=False, scale=1.0)

    def block(*, decoder: bool = False, last: bool = False) -> Block:
        return Block(
            attention_norm=norm(),
            attention=attention(),
            mlp_norm=norm(),
            mlp=(
                GatedMLP(config.hidden, config.ffn_hidden, bias=False, activation="gelu_tanh")
                if config.gated
                else MLP(config.hidden, config.ffn_hidden, bias=False, activation="relu")
            ),
            cross_norm=norm() if decoder else None,
            cross=attention() if decoder else None,
            output_norm=norm() if last else None,
        )

    def bias(*, causal: bool) -> RelativeBias:
        return RelativeBias(config.heads, config.buckets, config.max_distance, causal=causal)

    return EncoderDecoder(
        embed=Embedding(config.vocab_size, config.hidden),
        encoder=[block(last=index == config.encoder_blocks - 1) for index in range(config.encoder_blocks)],
        decoder=[block(decoder=True) for _ in range(config.decoder_blocks)],
        norm=norm(),
        head=OutputHead(config.vocab_size, config.hidden, factor=config.head_factor),
        encoder_bias=bias(causal=False),
        decoder_bias=bias(causal=True),
        tie_embeddings=config.tie_embeddings,
    )


def initial_std(config: T5Config, name: str) -> float | None:
    """Recipe of Mesh TensorFlow, which T5 was trained with: 1 / sqrt(fan_in), embeddings 1.

    That of queries is divided by sqrt(head_width), which replaces the scale of the scores.
    """
    if "norm" in name:
        return None
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    width = config.head_width
    fan_in = {"tokens": 1, "query": config.hidden * width, "output": config.heads * width, "down": config.ffn_hidden}
    return config.init_std * fan_in.get(leaf, config.hidden) ** -0.5


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
    """Return the tensor of the relative position biases, which Hugging Face stores in the first block."""
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
    keys={
        "vocab_size": ("vocab_size", 32128),
        "n_positions": ("max_positions", 512),
        "d_model": ("hidden", 512),
        "d_kv": ("head_width", 64),
        "d_ff": ("ffn_hidden", 2048),
        "num_heads": ("heads", 8),
        "relative_attention_num_buckets": ("buckets", 32),
        "relative_attention_max_distance": ("max_distance", 128),
        "layer_norm_epsilon": ("norm_eps", 1e-6),
        "initializer_factor": ("init_std", 1.0),
    },
    constants={"is_encoder_decoder": True, "dropout_rate": 0.0},
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

FAMILY = Family(config=T5Config, build=_build, initial_std=initial_std, huggingface=(MAPPING,), on_every_stage=("*coder_bias.weight",))
