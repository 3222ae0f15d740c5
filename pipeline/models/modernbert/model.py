"""ModernBERT (Warner et al. 2024, https://arxiv.org/abs/2412.13663): an encoder with Llama's positions and Gemma's mix of windows."""

from __future__ import annotations

from functools import partial

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding
from pipeline.layers.init import Init, scaled_residual
from pipeline.layers.masked_head import MaskedHead
from pipeline.layers.mlp import GatedMLP
from pipeline.layers.rotary import Rotary
from pipeline.layers.stack import Block, Stack
from pipeline.models.family import Family
from pipeline.models.modernbert.config import ModernBertConfig
from pipeline.models.modernbert.huggingface import MAPPING


def build(config: ModernBertConfig) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""
    norm = partial(nn.LayerNorm, config.hidden, eps=config.norm_eps, bias=False)

    def block(layer: int) -> Block:
        is_global = config.is_global(layer)
        return Block(
            attention_norm=norm() if layer else None,  # the norm of the embedding is there
            attention=Attention(
                config.hidden,
                config.heads,
                config.kv_heads,
                config.head_dim,
                bias=False,
                # Mask counts the query's own position.
                window=None if is_global else config.local_attention // 2 + 1,
                rope="global" if is_global else "local",
            ),
            mlp_norm=norm(),
            mlp=GatedMLP(config.hidden, config.ffn_hidden, bias=False, activation="gelu"),
        )

    return Stack(
        embed=Embedding(config.vocab_size, config.hidden, norm=norm()),
        blocks=[block(layer) for layer in range(config.layers)],
        norm=norm(),
        head=MaskedHead(config.vocab_size, config.hidden, config.norm_eps, sentence=False, bias=False),
        rotary=Rotary(config.head_dim, config.max_positions, config.rope_theta),
        local_rotary=Rotary(config.head_dim, config.max_positions, config.rope_local_theta),
        causal=False,
        tie_embeddings=config.tie_embeddings,
    )


def initial_std(config: ModernBertConfig, name: str) -> Init:
    """The recipe of the stock class (_init_weights, modeling_modernbert.py in transformers), here not truncated."""
    if name in ("head.dense.weight", "head.output.weight"):
        return scaled_residual(config, "attention.output.weight")
    return scaled_residual(config, name)


MODERNBERT = Family(
    config=ModernBertConfig,
    build=build,
    initial_std=initial_std,
    huggingface=(MAPPING,),
    tied_weights=lambda config: {"head.output.weight": "embed.tokens.weight"} if config.tie_embeddings else {},
)
