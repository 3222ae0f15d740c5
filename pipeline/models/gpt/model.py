"""GPT-2 (Radford et al. 2019) and GPT-3 (Brown et al. 2020, with dense attention in every layer)."""

from __future__ import annotations

import math

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.mlp import MLP
from pipeline.layers.stack import Block, Stack
from pipeline.models.gpt.config import GPTConfig


def build(config: GPTConfig) -> Stack:
    """The whole model with uninitialised weights on torch's default device."""

    def block() -> Block:
        return Block(
            attention_norm=nn.LayerNorm(config.hidden, eps=config.norm_eps),
            attention=Attention(config.hidden, config.heads, config.kv_heads, config.head_dim, bias=True),
            mlp_norm=nn.LayerNorm(config.hidden, eps=config.norm_eps),
            mlp=MLP(config.hidden, config.ffn_hidden, bias=True),
        )

    return Stack(
        embed=Embedding(config.vocab_size, config.hidden, config.max_positions),
        blocks=[block() for _ in range(config.layers)],
        norm=nn.LayerNorm(config.hidden, eps=config.norm_eps),
        head=OutputHead(config.vocab_size, config.hidden),
        tie_embeddings=config.tie_embeddings,
    )


def initial_std(config: GPTConfig, name: str) -> float | None:
    """As OpenAI published it (github.com/openai/gpt-2, src/model.py): positions at half the spread of everything else.

    What is added to the residual stream is scaled by 1 / sqrt(number of such layers) (section 2.3 of the GPT-2 paper).
    """
    if "norm" in name or name.endswith(".bias"):
        return None
    if name == "embed.positions.weight":
        return config.init_std / 2
    if name.endswith(("attention.output.weight", "mlp.down.weight")):
        return config.init_std / math.sqrt(2 * config.layers)
    return config.init_std
