"""Qwen 3.5 with experts (Qwen Team 2026, https://huggingface.co/Qwen/Qwen3.5-35B-A3B): Qwen3-Next's layers with experts in every block.

Qwen3_5MoeForCausalLM of transformers, and the language model of Qwen3_5MoeForConditionalGeneration, which is imported alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.common.knobs import knob
from pipeline.models.decoder_mapping import BALANCE_LOSS, decoder_mapping
from pipeline.models.families import qwen3_5
from pipeline.models.families.qwen3_next import LINEAR_KEYS, SHARED_EXPERT_MOE, hybrid, hybrid_table, initial_std, shared_expert_moe
from pipeline.models.family import Family, Model
from pipeline.models.shared_sizes import ExpertsConfig, LinearAttentionConfig, PartialRotaryConfig, RotaryDecoderConfig


@dataclass(frozen=True)
class Qwen35MoeConfig(
    PartialRotaryConfig,
    LinearAttentionConfig,
    ExpertsConfig,
    RotaryDecoderConfig,
    family="qwen3_5_moe",
    partial_rotary_factor=0.25,
    layers=40,
    hidden=2048,
    experts=256,
    vocab_size=248320,
    max_positions=32768,
    norm_eps=1e-6,
    rope_theta=1e7,
):
    """Linear attention in most layers and, at an interval, gated full attention; many fine-grained experts and a gated shared one."""

    query_key_norm: ClassVar[bool] = True

    ffn_hidden: int = knob(512, "intermediate width of each expert", at_least=1)
    shared_ffn_hidden: int = knob(512, "intermediate width of the shared expert", at_least=1)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Training settings of this family and their defaults."""
        return {"balance_loss": 0.001, "z_loss": 0.0}


def _build(config: Qwen35MoeConfig) -> Model:
    from pipeline.layers.stack import MoEStack

    return hybrid(config, mlp=lambda _: shared_expert_moe(config, config.ffn_hidden, normalize=True), stack=MoEStack)


MAPPING = decoder_mapping(
    "Qwen3_5MoeForCausalLM",
    "qwen3_5_moe_text",
    wrappers=(qwen3_5.with_images("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),),
    without=("intermediate_size",),
    keys={
        **LINEAR_KEYS,
        "num_experts": ("experts", 256),
        "num_experts_per_tok": ("top_k", 8),
        "moe_intermediate_size": ("ffn_hidden", 512),
        "shared_expert_intermediate_size": ("shared_ffn_hidden", 512),
    },
    defaults={**qwen3_5.DEFAULTS, "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2},
    training_keys=BALANCE_LOSS,
    ignored_keys=("output_router_logits",),
    table=lambda config: hybrid_table(config, qwen3_5.INPUTS, lambda _: SHARED_EXPERT_MOE),
    **qwen3_5.SHARED,
)

FAMILY = Family(config=Qwen35MoeConfig, build=_build, initial_std=initial_std, huggingface=(MAPPING,))
