"""Apertus (Swiss AI Initiative 2025, https://arxiv.org/abs/2509.14233)."""

from __future__ import annotations

from functools import partial

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.init import Init, scaled_residual
from pipeline.layers.mlp import MLP, XIELU
from pipeline.layers.rope_scaling import RopeScaling
from pipeline.layers.rotary import Rotary
from pipeline.layers.stack import Block, Stack
from pipeline.models import rope
from pipeline.models.apertus.config import ApertusConfig
from pipeline.models.apertus.huggingface import MAPPING
from pipeline.models.family import Family


def build(config: ApertusConfig) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""
    norm = partial(nn.RMSNorm, config.hidden, eps=config.norm_eps)

    def block() -> Block:
        return Block(
            attention_norm=norm(),
            attention=Attention(
                config.hidden,
                config.heads,
                config.kv_heads,
                config.head_dim,
                bias=False,
                head_norm=partial(nn.RMSNorm, config.head_dim, eps=config.norm_eps),
            ),
            mlp_norm=norm(),
            mlp=MLP(config.hidden, config.ffn_hidden, bias=False, activation=XIELU()),
        )

    return Stack(
        embed=Embedding(config.vocab_size, config.hidden),
        blocks=[block() for _ in range(config.layers)],
        norm=norm(),
        head=OutputHead(config.vocab_size, config.hidden),
        rotary=Rotary(config.head_dim, config.max_positions, config.rope_theta, RopeScaling(**rope.scaling(config))),
        tie_embeddings=config.tie_embeddings,
    )


def initial_std(config: ApertusConfig, name: str) -> Init:
    """GPT-2's recipe, and xIELU's initial curvatures."""
    _, dot, leaf = name.rpartition("mlp.activation.")
    return XIELU.INITIAL[leaf] if dot else scaled_residual(config, name)


APERTUS = Family(
    config=ApertusConfig,
    build=build,
    initial_std=initial_std,
    huggingface=(MAPPING,),
)
