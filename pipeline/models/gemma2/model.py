"""Gemma 2 (Gemma Team 2024, https://arxiv.org/abs/2408.00118): every second layer attends locally; scores and logits are bounded."""

from __future__ import annotations

import math
from functools import partial

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.mlp import GatedMLP
from pipeline.layers.norm import OffsetRMSNorm
from pipeline.layers.rope_scaling import RopeScaling
from pipeline.layers.rotary import Rotary
from pipeline.layers.stack import Block, Stack
from pipeline.models import rope
from pipeline.models.family import Family
from pipeline.models.gemma2.config import Gemma2Config
from pipeline.models.gemma2.huggingface import MAPPING
from pipeline.models.gemma3 import model as gemma3
from pipeline.models.shared_sizes import is_marked


def build(config: Gemma2Config) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""
    norm = partial(OffsetRMSNorm, config.hidden, eps=config.norm_eps)

    def block(layer: int) -> Block:
        return Block(
            attention_norm=norm(),
            attention=Attention(
                config.hidden,
                config.heads,
                config.kv_heads,
                config.head_dim,
                bias=False,
                window=None if is_marked(layer, config.sliding_window_pattern) else config.window,
                scale=1 / math.sqrt(config.query_pre_attn_scalar),
            ),
            post_attention_norm=norm(),
            mlp_norm=norm(),
            mlp=GatedMLP(config.hidden, config.ffn_hidden, bias=False, activation="gelu_tanh"),
            post_mlp_norm=norm(),
        )

    return Stack(
        embed=Embedding(config.vocab_size, config.hidden, factor=math.sqrt(config.hidden)),
        blocks=[block(layer) for layer in range(config.layers)],
        norm=norm(),
        head=OutputHead(config.vocab_size, config.hidden, softcap=config.final_logit_softcapping),
        rotary=Rotary(config.head_dim, config.max_positions, config.rope_theta, RopeScaling(**rope.scaling(config))),
        softcap=config.attn_logit_softcapping,
        tie_embeddings=config.tie_embeddings,
    )


GEMMA2 = Family(
    config=Gemma2Config,
    build=build,
    initial_std=gemma3.initial_std,
    huggingface=(MAPPING,),
)
