"""BLOOM (Le Scao et al. 2022, https://arxiv.org/abs/2211.05100)."""

from __future__ import annotations

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.init import scaled_residual
from pipeline.layers.mlp import MLP
from pipeline.layers.position_bias import AlibiSlopes
from pipeline.layers.stack import Block, Stack
from pipeline.models.bloom.config import BloomConfig
from pipeline.models.bloom.huggingface import MAPPING
from pipeline.models.family import Family


def build(config: BloomConfig) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""

    def norm() -> nn.LayerNorm:
        return nn.LayerNorm(config.hidden, eps=config.norm_eps)

    def block() -> Block:
        return Block(
            attention_norm=norm(),
            attention=Attention(config.hidden, config.heads, config.kv_heads, config.head_dim, bias=True),
            mlp_norm=norm(),
            mlp=MLP(config.hidden, config.ffn_hidden, bias=True),
        )

    return Stack(
        embed=Embedding(config.vocab_size, config.hidden, norm=norm()),
        blocks=[block() for _ in range(config.layers)],
        norm=norm(),
        head=OutputHead(config.vocab_size, config.hidden),
        slopes=AlibiSlopes(config.heads),
        tie_embeddings=config.tie_embeddings,
    )


BLOOM = Family(
    config=BloomConfig,
    build=build,
    # BigScience's recipe for all sizes (github.com/bigscience-workshop/bigscience, train/tr11-176B-ml): Megatron-LM's with N(0, 0.0048),
    # about 1 / sqrt(3 * hidden) of the largest size.
    initial_std=scaled_residual,
    huggingface=(MAPPING,),
)
