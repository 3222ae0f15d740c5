"""The Transformer (Vaswani et al. 2017, https://arxiv.org/abs/1706.03762)."""

from __future__ import annotations

import math

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.encoder_decoder import EncoderDecoder
from pipeline.layers.mlp import MLP
from pipeline.layers.stack import Block
from pipeline.models.costs import encoder_decoder_costs
from pipeline.models.family import Family
from pipeline.models.transformer.config import TransformerConfig
from pipeline.models.transformer.huggingface import MAPPING


def build(config: TransformerConfig) -> EncoderDecoder:
    """Build the full model with uninitialized weights on torch's default device."""

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


TRANSFORMER = Family(
    config=TransformerConfig,
    build=build,
    initial_std=initial_std,
    huggingface=(MAPPING,),
    costs=encoder_decoder_costs,
)
