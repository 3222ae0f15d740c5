"""The Transformer (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762). MarianMTModel of transformers, whose blocks are post-norm."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.models.config_json_keys import layer_counts
from pipeline.models.decoder_mapping import BOTH
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, StockTensor, StoredTensors, refusal, tensors
from pipeline.models.shared_sizes import EncoderDecoderSizes, heads_violations

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TransformerConfig(EncoderDecoderSizes, family="transformer", vocab_size=37000, max_positions=1024):
    """Encoder-decoder with post-norm LayerNorm, ReLU, sinusoidal position embeddings and shared embeddings."""

    norm_eps: float = knob(1e-5, "added to the variance in LayerNorm", above=0, at_most=0.1)
    activation: str = knob("relu", "activation of the feed-forward; silu in many OPUS-MT models", choices=("relu", "gelu", "silu"))
    label_smoothing: float = knob(0.1, "probability mass of the target that is spread over the vocabulary", at_least=0, at_most=0.999)
    output_bias: bool = knob(False, "bias of the output head, as in OPUS-MT models")

    @property
    def objective(self) -> str:
        """Training objective: source-target pairs."""
        return "pairs"

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads

    def violations(self) -> list[Violation]:
        """See Sizes."""
        violations = [*super().violations(), *heads_violations(self.hidden, self.heads)]
        if self.hidden % 2:
            rule = "must be even: half of the dims of the position embedding are sines, half are cosines"
            violations.append(Violation("model.hidden", self.hidden, rule, "choose an even width"))
        return violations


def _build(config: TransformerConfig) -> Model:
    from torch import nn

    from pipeline.layers.attention import Attention
    from pipeline.layers.embedding import Embedding, OutputHead
    from pipeline.layers.encoder_decoder import EncoderDecoder
    from pipeline.layers.mlp import MLP
    from pipeline.layers.stack import Block

    def norm() -> nn.LayerNorm:
        return nn.LayerNorm(config.hidden, eps=config.norm_eps)

    def attention() -> Attention:
        return Attention(config.hidden, config.heads, config.heads, config.head_dim, bias=True)

    def block(*, decoder: bool = False) -> Block:
        return Block(
            attention_norm=norm(),
            attention=attention(),
            mlp_norm=norm(),
            mlp=MLP(config.hidden, config.ffn_hidden, bias=True, activation=config.activation),
            post_norm=True,
            cross_norm=norm() if decoder else None,
            cross=attention() if decoder else None,
        )

    return EncoderDecoder(
        embed=Embedding(config.vocab_size, config.hidden, config.max_positions, factor=math.sqrt(config.hidden), sinusoidal=True),
        encoder=[block() for _ in range(config.encoder_blocks)],
        decoder=[block(decoder=True) for _ in range(config.decoder_blocks)],
        norm=None,
        head=OutputHead(config.vocab_size, config.hidden, bias=config.output_bias, label_smoothing=config.label_smoothing),
        tie_embeddings=config.tie_embeddings,
    )


def initial_std(config: TransformerConfig, name: str) -> float | None:
    """Recipe of the authors' tensor2tensor, but with normal distributions only.

    Matrices: sqrt(2 / (fan_in + fan_out)) (Glorot & Bengio 2010, uniform in tensor2tensor); embeddings: 1 / sqrt(hidden), which the
    embedding's factor sqrt(hidden) scales to 1.
    """
    if "norm" in name or name.endswith(".bias"):
        return None
    if name in ("embed.tokens.weight", "head.weight"):
        return config.init_std * config.hidden**-0.5
    outer = config.ffn_hidden if ".mlp." in name else config.hidden
    return config.init_std * math.sqrt(2 / (config.hidden + outer))


def _attention(part: str, hf: str, name: str) -> tuple[StockTensor, ...]:
    """Return the tensors of an attention layer and its norm."""
    hf_layer = f"model.{part}.layers.{{{part}}}.{hf}"
    return (
        *tensors(f"{hf_layer}.k_proj", f"blocks.{{{part}}}.{name}.key", leaves=BOTH),
        *tensors(f"{hf_layer}.v_proj", f"blocks.{{{part}}}.{name}.value", leaves=BOTH),
        *tensors(f"{hf_layer}.q_proj", f"blocks.{{{part}}}.{name}.query", leaves=BOTH),
        *tensors(f"{hf_layer}.out_proj", f"blocks.{{{part}}}.{name}.output", leaves=BOTH),
        *tensors(f"{hf_layer}_layer_norm", f"blocks.{{{part}}}.{name}_norm", leaves=BOTH),
    )


def _feed_forward(part: str) -> tuple[StockTensor, ...]:
    """Return the tensors of a feed-forward and its norm."""
    hf_layer = f"model.{part}.layers.{{{part}}}"
    return (
        *tensors(f"{hf_layer}.fc1", f"blocks.{{{part}}}.mlp.up", leaves=BOTH),
        *tensors(f"{hf_layer}.fc2", f"blocks.{{{part}}}.mlp.down", leaves=BOTH),
        *tensors(f"{hf_layer}.final_layer_norm", f"blocks.{{{part}}}.mlp_norm", leaves=BOTH),
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
    from pipeline.layers.positions import SinusoidalPositions

    return SinusoidalPositions(config.max_positions, config.hidden).table


MAPPING = HuggingFaceMapping(
    architecture="MarianMTModel",
    model_type="marian",
    keys={
        "vocab_size": ("vocab_size", 58101),
        "decoder_vocab_size": ("vocab_size", lambda content: content.get("vocab_size", 58101)),
        "max_position_embeddings": ("max_positions", 1024),
        "d_model": ("hidden", 1024),
        "encoder_attention_heads": ("heads", 16),
        "decoder_attention_heads": ("heads", 16),
        "encoder_ffn_dim": ("ffn_hidden", 4096),
        "decoder_ffn_dim": ("ffn_hidden", 4096),
        "tie_word_embeddings": ("tie_embeddings", True),
    },
    constant_defaults={"scale_embedding": False},
    constants={
        "scale_embedding": True,
        "share_encoder_decoder_embeddings": True,
        "is_encoder_decoder": True,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
    },
    implied={"norm_eps": 1e-5},
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
        *((StockTensor("final_logits_bias", ("head.bias",), added_dims=(1, 0)),) if config.output_bias else ()),
    ),
)

FAMILY = Family(config=TransformerConfig, build=_build, initial_std=initial_std, huggingface=(MAPPING,))
