"""GLM-4.5 (GLM-4.5 Team 2025, https://arxiv.org/abs/2508.06471): grouped-query attention in the blocks of DeepSeek-V3.

Glm4MoeForCausalLM of transformers. MTP modules follow the last layer, as in released files of 46 and 92 layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.knobs import knob
from pipeline.layers.recipes import scaled_residual
from pipeline.models import rope
from pipeline.models.config_json_keys import partial_rope
from pipeline.models.decoder_mapping import BOTH, LAYER, decoder_mapping, projections
from pipeline.models.families.deepseek_v3 import (
    COPIES,
    EXPERT_KEYS,
    assemble,
    table,
    tied_weights,
    unexpected_modules,
    without_missing_modules,
)
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import StockTensor, tensors
from pipeline.models.shared_sizes import PartialRotaryConfig, RotaryDecoderConfig, SharedExpertsConfig, rotated_dims


@dataclass(frozen=True)
class Glm4MoeConfig(
    PartialRotaryConfig,
    SharedExpertsConfig,
    RotaryDecoderConfig,
    family="glm4_moe",
    layers=46,
    heads=96,
    kv_heads=8,
    head_width=128,
    dense_layers=1,
    ffn_hidden=10944,
    experts=128,
    expert_ffn_hidden=1408,
    groups=1,
    topk_group=1,
    routed_scaling_factor=1.0,
    vocab_size=151552,
    max_positions=131072,
    rope_theta=1e6,
):
    """DeepSeek-V3's blocks with grouped-query attention, whose rotary positions are in a part of the dims of a head."""

    qkv_bias: bool = knob(True, "biases of the query, key and value projections")
    query_key_norm: bool = knob(False, "RMSNorm over the width of each head's queries and keys (GLM-4.5, not Air)")


def _build(config: Glm4MoeConfig) -> Model:
    from functools import partial

    from torch import nn

    from pipeline.layers.attention import Attention
    from pipeline.layers.rope_scaling import RopeScaling
    from pipeline.layers.rotary import Rotary

    head_norm = partial(nn.RMSNorm, config.head_dim, eps=config.norm_eps)
    sizes = config.hidden, config.heads, config.kv_heads, config.head_dim

    def attention() -> Attention:
        return Attention(*sizes, bias=config.qkv_bias, output_bias=False, head_norm=head_norm if config.query_key_norm else None)

    dims = rotated_dims(config.head_dim, config.partial_rotary_factor)
    return assemble(config, attention, Rotary(dims, config.max_positions, config.rope_theta, RopeScaling(**rope.scaling(config))))


def _attention(module: str, config: Glm4MoeConfig) -> tuple[StockTensor, ...]:
    """Return the tensors of the attention and the norms of a block, which is `module` in our model."""
    norms = {"q_norm": "query_norm", "k_norm": "key_norm"} if config.query_key_norm else {}
    return (
        *tensors(f"{LAYER}.input_layernorm", f"{module}.attention_norm"),
        *projections(BOTH if config.qkv_bias else ("weight",), block=module),
        *(entry for name, ours in norms.items() for entry in tensors(f"{LAYER}.self_attn.{name}", f"{module}.attention.{ours}")),
        *tensors(f"{LAYER}.post_attention_layernorm", f"{module}.mlp_norm"),
    )


MAPPING = decoder_mapping(
    "Glm4MoeForCausalLM",
    "glm4_moe",
    keys={**EXPERT_KEYS, "attention_bias": ("qkv_bias", False), "use_qk_norm": ("query_key_norm", False)},
    defaults={
        "vocab_size": 151552,
        "max_position_embeddings": 131072,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "intermediate_size": 10944,
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 1,
        "n_routed_experts": 128,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
    },
    rope=partial_rope(share=0.5),
    ignored_weights=COPIES,
    from_weights=without_missing_modules,
    separate_weights=unexpected_modules(46, 92),
    table=lambda config: table(config, _attention),
)

# Initial weights: GPT-2's recipe; the GLM team published none.
FAMILY = Family(config=Glm4MoeConfig, build=_build, initial_std=scaled_residual, huggingface=(MAPPING,), tied_weights=tied_weights)
