"""Llama 1 (Touvron et al. 2023), 2 and 3; Qwen 2.5 (Qwen Team 2024, https://arxiv.org/abs/2412.15115) and 3 (2025, https://arxiv.org/abs/2505.09388)."""

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
from pipeline.models import mup, rope
from pipeline.models.family import Family
from pipeline.models.llama.config import LlamaConfig
from pipeline.models.llama.huggingface import MAPPINGS
from pipeline.models.shared_sizes import is_marked
from pipeline.models.smollm3.huggingface import EXPORT as SMOLLM3


def build(config: LlamaConfig) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""
    head_norm = partial(nn.RMSNorm, config.head_dim, eps=config.norm_eps) if config.query_key_norm else None

    def block(layer: int) -> Block:
        interval = config.no_rope_layer_interval
        return Block(
            attention_norm=nn.RMSNorm(config.hidden, eps=config.norm_eps),
            attention=Attention(
                config.hidden,
                config.heads,
                config.kv_heads,
                config.head_dim,
                bias=config.attention_bias or config.qkv_bias,
                output_bias=config.attention_bias,
                rope="none" if interval is not None and is_marked(layer, interval) else "global",
                head_norm=head_norm,
            ),
            mlp_norm=nn.RMSNorm(config.hidden, eps=config.norm_eps),
            mlp=GatedMLP(config.hidden, config.ffn_hidden, bias=False),
        )

    return Stack(
        embed=Embedding(config.vocab_size, config.hidden),
        blocks=[block(layer) for layer in range(config.layers)],
        norm=nn.RMSNorm(config.hidden, eps=config.norm_eps),
        head=OutputHead(config.vocab_size, config.hidden),
        rotary=Rotary(config.head_dim, config.max_positions, config.rope_theta, RopeScaling(**rope.scaling(config))),
        tie_embeddings=config.tie_embeddings,
    )


LLAMA = Family(
    config=LlamaConfig,
    build=build,
    # GPT-2's recipe; Meta published none.
    initial_std=mup.initial(scaled_residual),
    rate=mup.rate,
    huggingface=(*MAPPINGS, SMOLLM3),
)
