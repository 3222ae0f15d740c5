"""gpt-oss (OpenAI 2025, https://arxiv.org/abs/2508.10925): attention sinks, mostly local attention, and experts with biases."""

from __future__ import annotations

from functools import partial

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.experts import Experts
from pipeline.layers.init import Constant, Init, scaled_residual
from pipeline.layers.mlp import ClampedSwiGLU
from pipeline.layers.moe import MoE
from pipeline.layers.moe_stack import MoEStack
from pipeline.layers.rope_scaling import RopeScaling
from pipeline.layers.rotary import Rotary
from pipeline.layers.router import Router
from pipeline.layers.stack import Block
from pipeline.models import rope
from pipeline.models.family import Family
from pipeline.models.gpt_oss.config import GptOssConfig
from pipeline.models.gpt_oss.huggingface import MAPPING
from pipeline.models.shared_sizes import is_marked


def build(config: GptOssConfig) -> MoEStack:
    """Build the full model with uninitialized weights on torch's default device."""
    norm = partial(nn.RMSNorm, config.hidden, eps=config.norm_eps)

    def moe() -> MoE:
        # The softmax over the selected logits is the one over all of them, normalized.
        router = Router(config.hidden, config.experts, config.top_k, logit_bias=True)
        swiglu = ClampedSwiGLU(config.swiglu_limit, config.swiglu_alpha)
        experts = Experts(config.experts, config.hidden, config.ffn_hidden, activation=swiglu, bias=True)
        return MoE(router, experts, capacity_factor=config.capacity_factor)

    def block(layer: int) -> Block:
        return Block(
            attention_norm=norm(),
            attention=Attention(
                config.hidden,
                config.heads,
                config.kv_heads,
                config.head_dim,
                bias=config.attention_bias,
                window=None if is_marked(layer, config.sliding_window_pattern) else config.window,
                sinks=True,
            ),
            mlp_norm=norm(),
            mlp=moe(),
        )

    model = MoEStack(
        embed=Embedding(config.vocab_size, config.hidden),
        blocks=[block(layer) for layer in range(config.layers)],
        norm=norm(),
        head=OutputHead(config.vocab_size, config.hidden),
        rotary=Rotary(config.head_dim, config.max_positions, config.rope_theta, RopeScaling(**rope.scaling(config))),
        tie_embeddings=config.tie_embeddings,
    )
    model.set_loss_weights(config.loss_weights)
    return model


def initial_std(config: GptOssConfig, name: str) -> Init:
    """Return the standard deviation of weight `name`: GPT-2's recipe, since OpenAI published none; sinks as the stock class has them."""
    return Constant(0.0) if name.endswith("_bias") else scaled_residual(config, name)


GPT_OSS = Family(
    config=GptOssConfig,
    build=build,
    initial_std=initial_std,
    huggingface=(MAPPING,),
)
