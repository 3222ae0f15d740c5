"""T5 (Raffel et al. 2020, https://arxiv.org/abs/1910.10683) and its version 1.1."""

from __future__ import annotations

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.encoder_decoder import EncoderDecoder
from pipeline.layers.mlp import MLP, GatedMLP
from pipeline.layers.position_bias import RelativeBias
from pipeline.layers.stack import Block
from pipeline.models.costs import encoder_decoder_costs
from pipeline.models.family import Family
from pipeline.models.t5.config import T5Config
from pipeline.models.t5.huggingface import MAPPING


def build(config: T5Config) -> EncoderDecoder:
    """Build the full model with uninitialized weights on torch's default device."""

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
    fan_in = {
        "tokens": 1,
        "query": config.hidden * config.head_width,
        "output": config.heads * config.head_width,
        "down": config.ffn_hidden,
    }
    return config.init_std * fan_in.get(leaf, config.hidden) ** -0.5


T5 = Family(
    config=T5Config,
    build=build,
    initial_std=initial_std,
    huggingface=(MAPPING,),
    on_every_stage=("*coder_bias.weight",),
    costs=encoder_decoder_costs,
)
