"""OLMo 2 (Team OLMo 2025, https://arxiv.org/abs/2501.00656): the output of each layer is normalized, not its input."""

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
from pipeline.models.olmo2.config import Olmo2Config
from pipeline.models.olmo2.huggingface import MAPPING
from pipeline.models.tensor_parallel_roles import WITH_WIDTH_NORMS


def build(config: Olmo2Config) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""
    norm = partial(nn.RMSNorm, eps=config.norm_eps)

    def block() -> Block:
        return Block(
            attention_norm=None,
            attention=Attention(config.hidden, config.heads, config.kv_heads, config.head_dim, bias=False, width_norm=norm),
            post_attention_norm=norm(config.hidden),
            mlp_norm=None,
            mlp=GatedMLP(config.hidden, config.ffn_hidden, bias=False),
            post_mlp_norm=norm(config.hidden),
        )

    return Stack(
        embed=Embedding(config.vocab_size, config.hidden),
        blocks=[block() for _ in range(config.layers)],
        norm=norm(config.hidden),
        head=OutputHead(config.vocab_size, config.hidden),
        rotary=Rotary(config.head_dim, config.max_positions, config.rope_theta, RopeScaling(**rope.scaling(config))),
        tie_embeddings=config.tie_embeddings,
    )


OLMO2 = Family(
    config=Olmo2Config,
    build=build,
    # Section 3.2 of the paper.
    initial_std=single_std,
    tensor_parallel=WITH_WIDTH_NORMS,
    huggingface=(MAPPING,),
)
