"""OLMo 3 (Team OLMo 2025, https://arxiv.org/abs/2512.13961): OLMo 2 with mostly local attention; only the global layers are scaled."""

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
from pipeline.models.olmo3.config import Olmo3Config
from pipeline.models.olmo3.huggingface import MAPPING
from pipeline.models.shared_sizes import is_marked
from pipeline.models.tensor_parallel_roles import WITH_WIDTH_NORMS


def build(config: Olmo3Config) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""
    norm = partial(nn.RMSNorm, eps=config.norm_eps)

    def block(layer: int) -> Block:
        is_global = is_marked(layer, config.sliding_window_pattern)
        return Block(
            attention_norm=None,
            attention=Attention(
                config.hidden,
                config.heads,
                config.kv_heads,
                config.head_dim,
                bias=False,
                window=None if is_global else config.window,
                rope="global" if is_global else "local",
                width_norm=norm,
            ),
            post_attention_norm=norm(config.hidden),
            mlp_norm=None,
            mlp=GatedMLP(config.hidden, config.ffn_hidden, bias=False),
            post_mlp_norm=norm(config.hidden),
        )

    return Stack(
        embed=Embedding(config.vocab_size, config.hidden),
        blocks=[block(layer) for layer in range(config.layers)],
        norm=norm(config.hidden),
        head=OutputHead(config.vocab_size, config.hidden),
        rotary=Rotary(config.head_dim, config.max_positions, config.rope_theta, RopeScaling(**rope.scaling(config))),
        local_rotary=Rotary(config.head_dim, config.max_positions, config.rope_local_theta),
        tie_embeddings=config.tie_embeddings,
    )


OLMO3 = Family(
    config=Olmo3Config,
    build=build,
    # OLMo 2's recipe.
    initial_std=single_std,
    tensor_parallel=WITH_WIDTH_NORMS,
    huggingface=(MAPPING,),
)
