"""GPT-1 (Radford et al. 2018, Improving Language Understanding by Generative Pre-Training): the decoder of Vaswani et al. 2017."""

from __future__ import annotations

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.init import single_std
from pipeline.layers.mlp import MLP
from pipeline.layers.stack import Block, Stack
from pipeline.models.family import Family
from pipeline.models.gpt1.config import GPT1Config
from pipeline.models.gpt1.huggingface import MAPPING


def build(config: GPT1Config) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""

    def block() -> Block:
        return Block(
            attention_norm=nn.LayerNorm(config.hidden, eps=config.norm_eps),
            attention=Attention(config.hidden, config.heads, config.kv_heads, config.head_dim, bias=True),
            mlp_norm=nn.LayerNorm(config.hidden, eps=config.norm_eps),
            mlp=MLP(config.hidden, config.ffn_hidden, bias=True),
            post_norm=True,
        )

    return Stack(
        embed=Embedding(config.vocab_size, config.hidden, config.max_positions),
        blocks=[block() for _ in range(config.layers)],
        norm=None,
        head=OutputHead(config.vocab_size, config.hidden),
        tie_embeddings=config.tie_embeddings,
    )


GPT1 = Family(
    config=GPT1Config,
    build=build,
    # N(0, 0.02) for every weight (section 4.1 of the paper); with post-norm, activations do not grow with depth.
    initial_std=single_std,
    huggingface=(MAPPING,),
)
