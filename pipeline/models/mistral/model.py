"""Mistral (Jiang et al. 2023, https://arxiv.org/abs/2310.06825): with a sliding window in each layer, n layers reach n windows back."""

from __future__ import annotations

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.init import scaled_residual
from pipeline.layers.mlp import GatedMLP
from pipeline.layers.rotary import Rotary
from pipeline.layers.stack import Block, Stack
from pipeline.models.family import Family
from pipeline.models.mistral.config import MistralConfig
from pipeline.models.mistral.huggingface import MAPPING


def build(config: MistralConfig) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""

    def block() -> Block:
        return Block(
            attention_norm=nn.RMSNorm(config.hidden, eps=config.norm_eps),
            attention=Attention(config.hidden, config.heads, config.kv_heads, config.head_dim, bias=False, window=config.window),
            mlp_norm=nn.RMSNorm(config.hidden, eps=config.norm_eps),
            mlp=GatedMLP(config.hidden, config.ffn_hidden, bias=False),
        )

    return Stack(
        embed=Embedding(config.vocab_size, config.hidden),
        blocks=[block() for _ in range(config.layers)],
        norm=nn.RMSNorm(config.hidden, eps=config.norm_eps),
        head=OutputHead(config.vocab_size, config.hidden),
        rotary=Rotary(config.head_dim, config.max_positions, config.rope_theta),
        tie_embeddings=config.tie_embeddings,
    )


MISTRAL = Family(
    config=MistralConfig,
    build=build,
    # GPT-2's recipe; Mistral AI published none.
    initial_std=scaled_residual,
    huggingface=(MAPPING,),
)
