"""Qwen3-Next (Qwen Team 2025, https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct): mostly linear attention, and experts."""

from __future__ import annotations

from functools import partial

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.experts import Experts
from pipeline.layers.gated_delta_net import GatedDeltaNet
from pipeline.layers.init import Constant, Init, LogOfUniform, scaled_residual
from pipeline.layers.mlp import GatedMLP, OutputGate
from pipeline.layers.moe import MoE, SharedExpertMoE
from pipeline.layers.moe_stack import MoEStack
from pipeline.layers.norm import OffsetRMSNorm
from pipeline.layers.rope_scaling import RopeScaling
from pipeline.layers.rotary import Rotary
from pipeline.layers.router import Router
from pipeline.layers.stack import Block
from pipeline.models import rope
from pipeline.models.family import Family
from pipeline.models.qwen3_next.config import Qwen3NextConfig
from pipeline.models.qwen3_next.huggingface import MAPPING
from pipeline.models.rules import rotated_dims


def build(config: Qwen3NextConfig) -> MoEStack:
    """Build the full model with uninitialized weights on torch's default device."""
    norm = partial(OffsetRMSNorm, eps=config.norm_eps)

    def full() -> Attention:
        return Attention(
            config.hidden,
            config.heads,
            config.kv_heads,
            config.head_dim,
            bias=False,
            head_norm=partial(norm, config.head_dim),
            gated=True,
        )

    def linear() -> GatedDeltaNet:
        return GatedDeltaNet(
            config.hidden,
            config.linear_key_heads,
            config.linear_value_heads,
            key_dim=config.linear_key_dim,
            value_dim=config.linear_value_dim,
            kernel=config.linear_kernel,
            eps=config.norm_eps,
        )

    def moe() -> SharedExpertMoE:
        router = Router(config.hidden, config.experts, config.top_k, normalize=config.norm_topk_prob)
        experts = Experts(config.experts, config.hidden, config.expert_ffn_hidden)
        routed = MoE(router, experts, capacity_factor=config.capacity_factor)
        shared = GatedMLP(config.hidden, config.shared_ffn_hidden, bias=False)
        return SharedExpertMoE(routed, shared, OutputGate(config.hidden))

    def block(index: int) -> Block:
        mlp: nn.Module = moe() if config.has_experts(index) else GatedMLP(config.hidden, config.ffn_hidden, bias=False)
        return Block(
            attention_norm=norm(config.hidden),
            attention=full() if config.is_full(index) else linear(),
            mlp_norm=norm(config.hidden),
            mlp=mlp,
        )

    rotated = rotated_dims(config.head_dim, config.partial_rotary_factor)
    model = MoEStack(
        embed=Embedding(config.vocab_size, config.hidden),
        blocks=[block(index) for index in range(config.layers)],
        norm=norm(config.hidden),
        head=OutputHead(config.vocab_size, config.hidden),
        rotary=Rotary(rotated, config.max_positions, config.rope_theta, RopeScaling(**rope.scaling(config))),
        tie_embeddings=config.tie_embeddings,
    )
    model.set_loss_weights(config.loss_weights)
    return model


def initial_std(config: Qwen3NextConfig, name: str) -> Init:
    """GPT-2's recipe, since the Qwen team published none, and the stock class's decay rates."""
    if name.endswith("decay_rate_log"):
        return LogOfUniform(0.01, 16.0)
    if name.endswith(("decay_bias", "output_norm.weight")):
        return Constant(1.0)
    return Constant(0.0) if "norm" in name else scaled_residual(config, name)  # norms multiply by one plus their weight


QWEN3_NEXT = Family(
    config=Qwen3NextConfig,
    build=build,
    initial_std=initial_std,
    huggingface=(MAPPING,),
)
