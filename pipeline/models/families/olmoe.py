"""OLMoE (Muennighoff et al. 2024, https://arxiv.org/abs/2409.02060): Llama's block with experts, and norms of queries and keys.

Files of OlmoeForCausalLM contain a tensor for each expert; the class fuses them on loading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pipeline.common.knobs import knob
from pipeline.layers.recipes import single_std
from pipeline.models.decoder_mapping import ATTENTION, BALANCE_LOSS, EXPERT_KEYS, EXPERTS, NO_PADDING, NORMS, decoder_mapping, decoder_table
from pipeline.models.family import Family
from pipeline.models.huggingface_mapping import BlockTensors
from pipeline.models.shared_sizes import RotaryMoEConfig
from pipeline.models.tensor_parallel_roles import WITH_WIDTH_NORMS

if TYPE_CHECKING:
    from pipeline.layers.stack import Stack


@dataclass(frozen=True)
class OlmoeConfig(RotaryMoEConfig, family="olmoe", layers=16, hidden=2048, heads=16, kv_heads=16, vocab_size=50304):
    """Llama's block with fine-grained experts, and RMSNorm over the full width of queries and keys."""

    #: Queries and keys have norms.
    query_key_norm: ClassVar[bool] = True

    ffn_hidden: int = knob(1024, "intermediate width of each expert", at_least=1)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Training settings of this family and their defaults: those of the paper (section 2)."""
        return {"balance_loss": 0.01, "z_loss": 0.001}


def build(config: OlmoeConfig) -> Stack:
    """Build the full model with uninitialized weights on torch's default device."""
    from pipeline.layers.moe_stack import MoEStack
    from pipeline.models.decoder import decoder, moe

    return decoder(
        config,
        query_key_norm="width",
        mlp=lambda _: moe(config, config.ffn_hidden, router={"normalize": config.norm_topk_prob}),
        stack=MoEStack,
    )


MAPPING = decoder_mapping(
    "OlmoeForCausalLM",
    "olmoe",
    fields={"head_dim": "head_dim", **EXPERT_KEYS},
    constants={"attention_bias": False, "clip_qkv": None},
    defaults={
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "head_dim": lambda content: content.get("hidden_size", 2048) // content.get("num_attention_heads", 16),
        "intermediate_size": 2048,
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    head_width=None,
    nested=(NO_PADDING,),
    training_keys=BALANCE_LOSS,
    ignored_keys=("output_router_logits",),  # a training setting
    implied={"head_width": None},  # the class has the norms of queries and keys of the width of hidden / heads
    table=decoder_table(BlockTensors((*ATTENTION, *NORMS, *EXPERTS), experts="experts")),
)

FAMILY = Family(
    config=OlmoeConfig,
    build=build,
    # The paper's, without its truncation at three standard deviations.
    initial_std=single_std,
    tensor_parallel=WITH_WIDTH_NORMS,
    huggingface=(MAPPING,),
)
