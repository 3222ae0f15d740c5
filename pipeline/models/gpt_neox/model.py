"""GPT-NeoX-20B (Black et al. 2022, https://arxiv.org/abs/2204.06745) and Pythia (Biderman et al. 2023, https://arxiv.org/abs/2304.01373)."""

from __future__ import annotations

import math

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.init import Init, scaled_residual
from pipeline.layers.mlp import MLP
from pipeline.layers.rope_scaling import RopeScaling
from pipeline.layers.rotary import Rotary
from pipeline.layers.stack import Block, Stack
from pipeline.models import rope
from pipeline.models.family import Family
from pipeline.models.gpt_neox.config import GPTNeoXConfig
from pipeline.models.gpt_neox.huggingface import MAPPING
from pipeline.models.rules import rotated_dims


def build(config: GPTNeoXConfig) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""

    def norm() -> nn.LayerNorm:
        return nn.LayerNorm(config.hidden, eps=config.norm_eps)

    def block() -> Block:
        return Block(
            attention_norm=norm(),
            attention=Attention(config.hidden, config.heads, config.kv_heads, config.head_dim, bias=config.attention_bias),
            mlp_norm=norm(),
            mlp=MLP(config.hidden, config.ffn_hidden, bias=True, activation=config.activation),
            parallel_residual=config.parallel_residual,
        )

    dims = rotated_dims(config.head_dim, config.partial_rotary_factor)
    return Stack(
        embed=Embedding(config.vocab_size, config.hidden),
        blocks=[block() for _ in range(config.layers)],
        norm=norm(),
        head=OutputHead(config.vocab_size, config.hidden),
        rotary=Rotary(dims, config.max_positions, config.rope_theta, RopeScaling(**rope.scaling(config))),
        tie_embeddings=config.tie_embeddings,
    )


def initial_std(config: GPTNeoXConfig, name: str) -> Init:
    """EleutherAI's recipe (github.com/EleutherAI/gpt-neox, megatron/model/init_functions.py): small_init, and wang_init for outputs.

    sqrt(2 / (5 hidden)) (Nguyen & Salazar 2019, https://arxiv.org/abs/1910.05895), and 2 / (layers sqrt(hidden)) for the layers whose
    output is added to the residual stream.
    """
    if "norm" in name or name.endswith(".bias") or config.init_method == "normal":
        return scaled_residual(config, name)
    if name.endswith(("attention.output.weight", "mlp.down.weight")):
        return 2 / (config.layers * math.sqrt(config.hidden))
    return math.sqrt(2 / (5 * config.hidden))


GPT_NEOX = Family(
    config=GPTNeoXConfig,
    build=build,
    initial_std=initial_std,
    huggingface=(MAPPING,),
)
