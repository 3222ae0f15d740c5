"""Qwen3-MoE (Qwen Team 2025, https://arxiv.org/abs/2505.09388): Qwen 3 with experts."""

from __future__ import annotations

from functools import partial

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.experts import Experts
from pipeline.layers.init import scaled_residual
from pipeline.layers.mlp import GatedMLP
from pipeline.layers.moe import MoE
from pipeline.layers.moe_stack import MoEStack
from pipeline.layers.rope_scaling import RopeScaling
from pipeline.layers.rotary import Rotary
from pipeline.layers.router import Router
from pipeline.layers.stack import Block
from pipeline.models import rope
from pipeline.models.family import Family
from pipeline.models.qwen3_moe.config import Qwen3MoeConfig
from pipeline.models.qwen3_moe.huggingface import MAPPING


def build(config: Qwen3MoeConfig) -> MoEStack:
    """Build the full model with uninitialized weights on torch's default device."""
    norm = partial(nn.RMSNorm, eps=config.norm_eps)

    def moe() -> MoE:
        router = Router(config.hidden, config.experts, config.top_k, normalize=config.norm_topk_prob)
        experts = Experts(config.experts, config.hidden, config.expert_ffn_hidden)
        return MoE(router, experts, capacity_factor=config.capacity_factor)

    def block(index: int) -> Block:
        return Block(
            attention_norm=norm(config.hidden),
            attention=Attention(
                config.hidden,
                config.heads,
                config.kv_heads,
                config.head_dim,
                bias=False,
                head_norm=partial(norm, config.head_dim),
            ),
            mlp_norm=norm(config.hidden),
            mlp=moe() if config.has_experts(index) else GatedMLP(config.hidden, config.ffn_hidden, bias=False),
        )

    model = MoEStack(
        embed=Embedding(config.vocab_size, config.hidden),
        blocks=[block(index) for index in range(config.layers)],
        norm=norm(config.hidden),
        head=OutputHead(config.vocab_size, config.hidden),
        rotary=Rotary(config.head_dim, config.max_positions, config.rope_theta, RopeScaling(**rope.scaling(config))),
        tie_embeddings=config.tie_embeddings,
    )
    model.set_loss_weights(config.loss_weights)
    return model


QWEN3_MOE = Family(
    config=Qwen3MoeConfig,
    build=build,
    # GPT-2's recipe; the Qwen team published none.
    initial_std=scaled_residual,
    huggingface=(MAPPING,),
)
