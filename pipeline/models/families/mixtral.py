"""Mixtral (Jiang et al. 2024, https://arxiv.org/abs/2401.04088): Mistral's block with experts.

Files of MixtralForCausalLM contain a tensor for each expert; the class fuses them on loading.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.layers.recipes import scaled_residual
from pipeline.models.config_json_keys import UNSCALED, with_theta
from pipeline.models.decoder_mapping import ATTENTION, BALANCE_LOSS, LAYER, decoder_mapping, decoder_table
from pipeline.models.families import mistral
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import BlockTensors, StockTensor, tensors
from pipeline.models.shared_sizes import DecoderConfig, ExpertsConfig, window_violations


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
        """See Sizes."""
        return [*super().violations(), *window_violations("model.window", self.window, self.max_positions)]


def _build(config: MixtralConfig) -> Model:
    from pipeline.layers.stack import MoEStack
    from pipeline.models.decoder import decoder, moe

    return decoder(config, attention=lambda _: {"window": config.window}, mlp=lambda _: moe(config, config.ffn_hidden), stack=MoEStack)


_EXPERT = f"{LAYER}.block_sparse_moe.experts.{{e}}"

MAPPING = decoder_mapping(
    "MixtralForCausalLM",
    "mixtral",
    keys={
        "head_dim": ("head_dim", lambda content: content.get("hidden_size", 4096) // content.get("num_attention_heads", 32)),
        "num_local_experts": ("experts", 8),
        "num_experts_per_tok": ("top_k", 2),
    },
    defaults={
        "max_position_embeddings": mistral.MAX_POSITIONS,
        "num_key_value_heads": mistral.kv_heads,
        "intermediate_size": 14336,
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
        )
    ),
)

# Initial weights: GPT-2's recipe; Mistral AI published none.
FAMILY = Family(config=MixtralConfig, build=_build, initial_std=scaled_residual, huggingface=(MAPPING,))
