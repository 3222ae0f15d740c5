"""GPT-2 (Radford et al. 2019) and GPT-3 (Brown et al. 2020)."""

from __future__ import annotations

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.init import scaled_residual
from pipeline.layers.mlp import MLP
from pipeline.layers.stack import Block, Stack
from pipeline.models import mup
from pipeline.models.family import Family
from pipeline.models.gpt.config import GPTConfig
from pipeline.models.gpt.huggingface import MAPPING


def build(config: GPTConfig) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""

    def block(index: int) -> Block:
        banded = index % 2 == 1  # dense and banded layers alternate (Brown et al. 2020, section 2.1, after Child et al. 2019)
        return Block(
            attention_norm=nn.LayerNorm(config.hidden, eps=config.norm_eps),
            attention=Attention(
                config.hidden,
                config.heads,
                config.kv_heads,
                config.head_dim,
                bias=True,
                window=config.banded_window if banded else None,
            ),
            mlp_norm=nn.LayerNorm(config.hidden, eps=config.norm_eps),
            mlp=MLP(config.hidden, config.ffn_hidden, bias=True),
        )

    return Stack(
        embed=Embedding(config.vocab_size, config.hidden, config.max_positions),
        blocks=[block(index) for index in range(config.layers)],
        norm=nn.LayerNorm(config.hidden, eps=config.norm_eps),
        head=OutputHead(config.vocab_size, config.hidden),
        tie_embeddings=config.tie_embeddings,
    )


def initial_std(config: GPTConfig, name: str) -> float | None:
    """OpenAI's recipe (github.com/openai/gpt-2, src/model.py): position embeddings with half the standard deviation of other weights."""
    if name == "embed.positions.weight":
        return config.init_std / 2
    return scaled_residual(config, name)


GPT = Family(
    config=GPTConfig,
    build=build,
    initial_std=mup.initial(initial_std),
    rate=mup.rate,
    huggingface=(MAPPING,),
)
