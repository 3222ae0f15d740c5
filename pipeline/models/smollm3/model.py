"""SmolLM3 (Hugging Face 2025, https://huggingface.co/blog/smollm3): Llama's block, in some layers without positions.

Layers without position embeddings (NoPE, Yang et al. 2025, https://arxiv.org/abs/2501.18795) attend by content alone, at any distance.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.init import scaled_residual
from pipeline.layers.mlp import GatedMLP
from pipeline.layers.rope_scaling import RopeScaling
from pipeline.layers.rotary import Rotary
from pipeline.layers.stack import Block, Stack
from pipeline.models import rope
from pipeline.models.family import Family
from pipeline.models.shared_sizes import is_marked
from pipeline.models.smollm3.config import SmolLM3Config
from pipeline.models.smollm3.huggingface import MAPPING


def build(config: SmolLM3Config) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""
    norm = partial(nn.RMSNorm, config.hidden, eps=config.norm_eps)

    def block(layer: int) -> Block:
        without_positions = is_marked(layer, config.no_rope_layer_interval)
        return Block(
            attention_norm=norm(),
            attention=Attention(
                config.hidden,
                config.heads,
                config.kv_heads,
                config.head_dim,
                bias=False,
                rope="none" if without_positions else "global",
            ),
            mlp_norm=norm(),
            mlp=GatedMLP(config.hidden, config.ffn_hidden, bias=False),
        )

    return Stack(
        embed=Embedding(config.vocab_size, config.hidden),
        blocks=[block(layer) for layer in range(config.layers)],
        norm=norm(),
        head=OutputHead(config.vocab_size, config.hidden),
        rotary=Rotary(config.head_dim, config.max_positions, config.rope_theta, RopeScaling(**rope.scaling(config))),
        tie_embeddings=config.tie_embeddings,
    )


SMOLLM3 = Family(
    config=SmolLM3Config,
    build=build,
    # GPT-2's recipe.
    initial_std=scaled_residual,
    huggingface=(MAPPING,),
)
