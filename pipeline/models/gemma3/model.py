"""Gemma 3 (Gemma Team 2025, https://arxiv.org/abs/2503.19786): mostly local attention, with another rotary base in the global layers."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.init import Constant, Init, scaled_residual
from pipeline.layers.mlp import GatedMLP
from pipeline.layers.norm import OffsetRMSNorm
from pipeline.layers.rope_scaling import RopeScaling
from pipeline.layers.rotary import Rotary
from pipeline.layers.stack import Block, Stack
from pipeline.models import rope
from pipeline.models.family import Family
from pipeline.models.gemma3.config import Gemma3Config
from pipeline.models.gemma3.huggingface import MAPPING
from pipeline.models.shared_sizes import is_marked


def build(config: Gemma3Config) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""
    norm = partial(OffsetRMSNorm, config.hidden, eps=config.norm_eps)

    def block(layer: int) -> Block:
        is_global = is_marked(layer, config.sliding_window_pattern)
        return Block(
            attention_norm=norm(),
            attention=Attention(
                config.hidden,
                config.heads,
                config.kv_heads,
                config.head_dim,
                bias=False,
                window=None if is_global else config.window,
                scale=1 / math.sqrt(config.query_pre_attn_scalar),
                rope="global" if is_global else "local",
                head_norm=partial(OffsetRMSNorm, config.head_dim, eps=config.norm_eps),
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
        head=OutputHead(config.vocab_size, config.hidden),
        rotary=Rotary(config.head_dim, config.max_positions, config.rope_theta, RopeScaling(**rope.scaling(config))),
        local_rotary=Rotary(config.head_dim, config.max_positions, config.rope_local_theta),
        tie_embeddings=config.tie_embeddings,
    )


def initial_std(config: Any, name: str) -> Init:
    """GPT-2's recipe; Google published none. Norms multiply by one plus their weight."""
    return Constant(0.0) if "norm" in name else scaled_residual(config, name)


GEMMA3 = Family(
    config=Gemma3Config,
    build=build,
    initial_std=initial_std,
    huggingface=(MAPPING,),
)
