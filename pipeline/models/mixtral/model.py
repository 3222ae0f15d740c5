"""Mixtral (Jiang et al. 2024, https://arxiv.org/abs/2401.04088)."""

from __future__ import annotations

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.experts import Experts
from pipeline.layers.init import scaled_residual
from pipeline.layers.moe import MoE
from pipeline.layers.moe_stack import MoEStack
from pipeline.layers.rotary import Rotary
from pipeline.layers.router import Router
from pipeline.layers.stack import Block
from pipeline.models.family import Family
from pipeline.models.mixtral.config import MixtralConfig
from pipeline.models.mixtral.huggingface import MAPPING


def build(config: MixtralConfig) -> MoEStack:
    """Build the full model with uninitialized weights on torch's default device."""

    def block() -> Block:
        return Block(
            attention_norm=nn.RMSNorm(config.hidden, eps=config.norm_eps),
            attention=Attention(config.hidden, config.heads, config.kv_heads, config.head_dim, bias=False, window=config.window),
            mlp_norm=nn.RMSNorm(config.hidden, eps=config.norm_eps),
            mlp=MoE(
                Router(config.hidden, config.experts, config.top_k),
                Experts(config.experts, config.hidden, config.ffn_hidden),
                capacity_factor=config.capacity_factor,
            ),
        )

    model = MoEStack(
        embed=Embedding(config.vocab_size, config.hidden),
        blocks=[block() for _ in range(config.layers)],
        norm=nn.RMSNorm(config.hidden, eps=config.norm_eps),
        head=OutputHead(config.vocab_size, config.hidden),
        rotary=Rotary(config.head_dim, config.max_positions, config.rope_theta),
        tie_embeddings=config.tie_embeddings,
    )
    model.set_loss_weights(config.loss_weights)
    return model


MIXTRAL = Family(
    config=MixtralConfig,
    build=build,
    # GPT-2's recipe; Mistral AI published none.
    initial_std=scaled_residual,
    huggingface=(MAPPING,),
)
