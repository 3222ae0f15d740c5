"""Nemotron-4 (Parmar et al. 2024, https://arxiv.org/abs/2402.16819) and Minitron (Muralidharan et al. 2024, https://arxiv.org/abs/2407.14679)."""

from __future__ import annotations

from functools import partial

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.init import Constant, Init, scaled_residual
from pipeline.layers.mlp import MLP
from pipeline.layers.norm import OffsetLayerNorm
from pipeline.layers.rope_scaling import RopeScaling
from pipeline.layers.rotary import Rotary
from pipeline.layers.stack import Block, Stack
from pipeline.models import rope
from pipeline.models.family import Family
from pipeline.models.nemotron.config import NemotronConfig
from pipeline.models.nemotron.huggingface import MAPPING
from pipeline.models.rules import rotated_dims


def build(config: NemotronConfig) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""
    norm = partial(OffsetLayerNorm, config.hidden, eps=config.norm_eps)

    def block() -> Block:
        return Block(
            attention_norm=norm(),
            attention=Attention(config.hidden, config.heads, config.kv_heads, config.head_dim, bias=False),
            mlp_norm=norm(),
            mlp=MLP(config.hidden, config.ffn_hidden, bias=False, activation="relu2"),
        )

    dims = rotated_dims(config.head_dim, config.partial_rotary_factor)
    return Stack(
        embed=Embedding(config.vocab_size, config.hidden),
        blocks=[block() for _ in range(config.layers)],
        norm=norm(),
        head=OutputHead(config.vocab_size, config.hidden),
        rotary=Rotary(dims, config.max_positions, config.rope_theta, RopeScaling(**rope.scaling(config))),
        tie_embeddings=config.tie_embeddings,
    )


def initial_std(config: NemotronConfig, name: str) -> Init:
    """Megatron-LM's recipe, with the standard deviation of NVIDIA's config.json. Norms multiply by one plus their weight."""
    return Constant(0.0) if "norm" in name else scaled_residual(config, name)


_NORMS = ("blocks.*.attention_norm.weight", "blocks.*.mlp_norm.weight", "norm.weight")

NEMOTRON = Family(
    config=NemotronConfig,
    build=build,
    initial_std=initial_std,
    huggingface=(MAPPING,),
)
