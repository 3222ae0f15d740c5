"""OPT (Zhang et al. 2022, https://arxiv.org/abs/2205.01068)."""

from __future__ import annotations

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.init import scaled_residual
from pipeline.layers.mlp import MLP
from pipeline.layers.stack import Block, Stack
from pipeline.models.family import Family
from pipeline.models.opt.config import OPTConfig
from pipeline.models.opt.huggingface import MAPPING


def build(config: OPTConfig) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""
    width = config.embed_width if config.projected else None

    def norm() -> nn.LayerNorm:
        return nn.LayerNorm(config.hidden, eps=config.norm_eps)

    def block() -> Block:
        return Block(
            attention_norm=norm(),
            attention=Attention(config.hidden, config.heads, config.kv_heads, config.head_dim, bias=True),
            mlp_norm=norm(),
            mlp=MLP(config.hidden, config.ffn_hidden, bias=True, activation=config.activation),
            post_norm=not config.pre_norm,
        )

    return Stack(
        embed=Embedding(config.vocab_size, config.hidden, config.max_positions, position_offset=2, width=width),
        blocks=[block() for _ in range(config.layers)],
        norm=norm() if config.pre_norm else None,
        head=OutputHead(config.vocab_size, config.hidden, width=width),
        tie_embeddings=config.tie_embeddings,
    )


OPT = Family(
    config=OPTConfig,
    build=build,
    # Megatron-LM's recipe with N(0, 0.006) (section 2.2 of the paper).
    initial_std=scaled_residual,
    huggingface=(MAPPING,),
)
