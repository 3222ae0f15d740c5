"""OLMoE (Muennighoff et al. 2024, https://arxiv.org/abs/2409.02060)."""

from __future__ import annotations

from functools import partial

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.embedding import Embedding, OutputHead
from pipeline.layers.experts import Experts
from pipeline.layers.init import single_std
from pipeline.layers.moe import MoE
from pipeline.layers.moe_stack import MoEStack
from pipeline.layers.rope_scaling import RopeScaling
from pipeline.layers.rotary import Rotary
from pipeline.layers.router import Router
from pipeline.layers.stack import Block
from pipeline.models import rope
from pipeline.models.family import Family
from pipeline.models.olmoe.config import OlmoeConfig
from pipeline.models.olmoe.huggingface import MAPPING
from pipeline.models.tensor_parallel_roles import WITH_WIDTH_NORMS


def build(config: OlmoeConfig) -> MoEStack:
    """Build the full model with uninitialized weights on torch's default device."""
    norm = partial(nn.RMSNorm, eps=config.norm_eps)

    def block() -> Block:
        return Block(
            attention_norm=norm(config.hidden),
            attention=Attention(config.hidden, config.heads, config.kv_heads, config.head_dim, bias=False, width_norm=norm),
            mlp_norm=norm(config.hidden),
            mlp=MoE(
                Router(config.hidden, config.experts, config.top_k, normalize=config.norm_topk_prob),
                Experts(config.experts, config.hidden, config.ffn_hidden),
                capacity_factor=config.capacity_factor,
            ),
        )

    model = MoEStack(
        embed=Embedding(config.vocab_size, config.hidden),
        blocks=[block() for _ in range(config.layers)],
        norm=norm(config.hidden),
        head=OutputHead(config.vocab_size, config.hidden),
        rotary=Rotary(config.head_dim, config.max_positions, config.rope_theta, RopeScaling(**rope.scaling(config))),
        tie_embeddings=config.tie_embeddings,
    )
    model.set_loss_weights(config.loss_weights)
    return model


OLMOE = Family(
    config=OlmoeConfig,
    build=build,
    # The paper's, without its truncation at three standard deviations.
    initial_std=single_std,
    tensor_parallel=WITH_WIDTH_NORMS,
    huggingface=(MAPPING,),
)
