"""GLM-4.5 (GLM-4.5 Team 2025, https://arxiv.org/abs/2508.06471): grouped-query attention in the blocks of DeepSeek-V3."""

from __future__ import annotations

from functools import partial

from torch import nn

from pipeline.layers.attention import Attention
from pipeline.layers.init import scaled_residual
from pipeline.layers.rope_scaling import RopeScaling
from pipeline.layers.rotary import Rotary
from pipeline.models import rope
from pipeline.models.deepseek_v3.model import DeepseekV3, assemble, tied_weights
from pipeline.models.family import Family
from pipeline.models.glm4_moe.config import Glm4MoeConfig
from pipeline.models.glm4_moe.huggingface import MAPPING
from pipeline.models.rules import rotated_dims


def build(config: Glm4MoeConfig) -> DeepseekV3:
    """Build the full model with uninitialized weights on torch's default device."""
    head_norm = partial(nn.RMSNorm, config.head_dim, eps=config.norm_eps)

    def attention() -> Attention:
        return Attention(
            config.hidden,
            config.heads,
            config.kv_heads,
            config.head_dim,
            bias=config.qkv_bias,
            output_bias=False,
            head_norm=head_norm if config.query_key_norm else None,
        )

    rotary = Rotary(
        rotated_dims(config.head_dim, config.partial_rotary_factor),
        config.max_positions,
        config.rope_theta,
        RopeScaling(**rope.scaling(config)),
    )
    return assemble(config, attention, rotary)


GLM4_MOE = Family(
    config=Glm4MoeConfig,
    build=build,
    # GPT-2's recipe; the GLM team published none.
    initial_std=scaled_residual,
    huggingface=(MAPPING,),
    tied_weights=tied_weights,
)
