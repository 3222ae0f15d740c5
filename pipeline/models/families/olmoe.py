"""OLMoE (Muennighoff et al. 2024, https://arxiv.org/abs/2409.02060): Llama's block with experts, and norms of queries and keys.

Files of OlmoeForCausalLM contain a tensor for each expert; the class fuses them on loading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pipeline.common.knobs import knob
from pipeline.layers.recipes import single_std
from pipeline.models.decoder_mapping import ATTENTION, BALANCE_LOSS, EXPERT_KEYS, EXPERTS, NO_PADDING, NORMS, decoder_mapping, decoder_table
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import BlockTensors
from pipeline.models.shared_sizes import RotaryMoEConfig
from pipeline.models.tensor_parallel_roles import WITH_WIDTH_NORMS


@dataclass(frozen=True)
class OlmoeConfig(RotaryMoEConfig, family="olmoe", layers=16, hidden=2048, heads=16, kv_heads=16, vocab_size=50304):
    """Llama's block with fine-grained experts, and RMSNorm over the full width of queries and keys."""

    query_key_norm: ClassVar[bool] = True

    ffn_hidden: int = knob(1024, "intermediate width of each expert", at_least=1)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Training settings of this family and their defaults: those of the paper (section 2)."""
        return {"balance_loss": 0.01, "z_loss": 0.001}


def _build(config: OlmoeConfig) -> Model:
    from pipeline.layers.stack import MoEStack
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
    keys={
        "head_dim": ("head_dim", lambda content: content.get("hidden_size", 2048) // content.get("num_attention_heads", 16)),
        **EXPERT_KEYS,
    },
    constants={"attention_bias": False, "clip_qkv": None},
    defaults={
        "vocab_size": 50304,
        "max_position_embeddings": 4096,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "intermediate_size": 2048,
        "rms_norm_eps": 1e-5,
    },
    head_width=None,
    nested=(NO_PADDING,),
    training_keys=BALANCE_LOSS,
    ignored_keys=("output_router_logits",),  # a training setting
    implied={"head_width": None},  # the class has the norms of queries and keys of the width of hidden / heads
    table=decoder_table(BlockTensors((*ATTENTION, *NORMS, *EXPERTS), experts="experts")),
)

# Initial weights: The paper's, without its truncation at three standard deviations.
FAMILY = Family(config=OlmoeConfig, build=_build, initial_std=single_std, tensor_parallel=WITH_WIDTH_NORMS, huggingface=(MAPPING,))
