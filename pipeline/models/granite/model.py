"""Granite 3 (IBM 2024, https://github.com/ibm-granite/granite-3.0-language-models): Llama's block with factors, as muP has them.

The factors keep the widths of a small and a large model comparable: those of the residual stream, of the scores and of the logits (maximal
update parametrization, Yang et al. 2022, https://arxiv.org/abs/2203.03466).
"""

from __future__ import annotations

from functools import partial

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.init import single_std
from pipeline.layers.mlp import GatedMLP
from pipeline.layers.rope_scaling import RopeScaling
from pipeline.layers.rotary import Rotary
from pipeline.layers.stack import Block, Stack
from pipeline.models import rope
from pipeline.models.family import Family
from pipeline.models.granite.config import GraniteConfig
from pipeline.models.granite.huggingface import MAPPING


def build(config: GraniteConfig) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""
    norm = partial(nn.RMSNorm, config.hidden, eps=config.norm_eps)

    def block() -> Block:
        return Block(
            attention_norm=norm(),
            attention=Attention(
                config.hidden, config.heads, config.kv_heads, config.head_dim, bias=False, scale=config.attention_multiplier
            ),
            mlp_norm=norm(),
            mlp=GatedMLP(config.hidden, config.ffn_hidden, bias=False),
            residual_factor=config.residual_multiplier,
        )

    return Stack(
        embed=Embedding(config.vocab_size, config.hidden, factor=config.embedding_multiplier),
        blocks=[block() for _ in range(config.layers)],
        norm=norm(),
        head=OutputHead(config.vocab_size, config.hidden, factor=1 / config.logits_scaling),
        rotary=Rotary(config.head_dim, config.max_positions, config.rope_theta, RopeScaling(**rope.scaling(config))),
        tie_embeddings=config.tie_embeddings,
    )


GRANITE = Family(
    config=GraniteConfig,
    build=build,
    # The residual factor takes the place of GPT-2's smaller outputs of the layers.
    initial_std=single_std,
    huggingface=(MAPPING,),
)
