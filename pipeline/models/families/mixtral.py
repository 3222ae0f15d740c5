"""Mixtral (Jiang et al. 2024, https://arxiv.org/abs/2401.04088): Mistral's block with experts.

Files of MixtralForCausalLM contain a tensor for each expert; the class fuses them on loading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.layers.recipes import scaled_residual
from pipeline.models.config_json_keys import UNSCALED, with_theta
from pipeline.models.decoder_mapping import ATTENTION, BALANCE_LOSS, LAYER, decoder_mapping, decoder_table
from pipeline.models.families import mistral
from pipeline.models.family import Family
from pipeline.models.huggingface_mapping import BlockTensors, StockTensor, tensors
from pipeline.models.rules import window_violations
from pipeline.models.shared_sizes import DecoderConfig, ExpertsConfig

if TYPE_CHECKING:
    from pipeline.layers.stack import Stack


@dataclass(frozen=True)
class MixtralConfig(DecoderConfig, ExpertsConfig, family="mixtral", kv_heads=8, experts=8, top_k=2, max_positions=32768):
    """Llama's block with MoE layers instead of feed-forwards."""

    ffn_hidden: int = knob(14336, "intermediate width of each expert", at_least=1)
    window: int | None = knob(None, mistral.WINDOW, unit="tokens", at_least=1)
    rope_theta: float = knob(1e6, "base of the rotary frequencies", above=0)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Training settings of this family and their defaults."""
        return {"balance_loss": 0.02, "z_loss": 0.0}

    def violations(self) -> list[Violation]:
        """Return the rules between sizes that this configuration violates."""
        windows = window_violations("model.window", self.window, self.max_positions)
        return [*super().violations(), *windows, *self.top_k_violations()]


def build(config: MixtralConfig) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""
    from pipeline.layers.moe_stack import MoEStack
    from pipeline.models.decoder import decoder, moe

    return decoder(config, attention=lambda _: {"window": config.window}, mlp=lambda _: moe(config, config.ffn_hidden), stack=MoEStack)


_EXPERT = f"{LAYER}.block_sparse_moe.experts.{{e}}"

MAPPING = decoder_mapping(
    "MixtralForCausalLM",
    "mixtral",
    fields={"head_dim": "head_dim", "num_local_experts": "experts", "num_experts_per_tok": "top_k"},
    defaults={
        "max_position_embeddings": mistral.MAX_POSITIONS,
        "num_key_value_heads": mistral.kv_heads,
        "intermediate_size": 14336,
        "head_dim": lambda content: content.get("hidden_size", 4096) // content.get("num_attention_heads", 32),
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
    },
    rope=with_theta(UNSCALED, 1e6),
    head_width=None,
    nested=(mistral.window(default=None),),
    training_keys=BALANCE_LOSS,
    renamed=((r"^(model\.layers\.\d+)\.mlp\.", r"\1.block_sparse_moe."),),  # the parameters of the class, which other tools save
    ignored_keys=("router_jitter_noise", "output_router_logits"),  # training settings
    table=decoder_table(
        BlockTensors(
            (
                *ATTENTION,
                *tensors(f"{LAYER}.block_sparse_moe.gate", "blocks.{i}.mlp.router"),
                StockTensor(f"{_EXPERT}.w1.weight", ("blocks.{i}.mlp.experts.gate",)),
                StockTensor(f"{_EXPERT}.w3.weight", ("blocks.{i}.mlp.experts.up",)),
                StockTensor(f"{_EXPERT}.w2.weight", ("blocks.{i}.mlp.experts.down",)),
            ),
            experts="experts",
        ),
    ),
)

FAMILY = Family(
    config=MixtralConfig,
    build=build,
    # GPT-2's recipe; Mistral AI published none.
    initial_std=scaled_residual,
    huggingface=(MAPPING,),
)
