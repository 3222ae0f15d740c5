"""Qwen3-MoE (Qwen Team 2025, https://arxiv.org/abs/2505.09388): Qwen 3 with experts.

Files of Qwen3MoeForCausalLM contain a tensor for each expert; the class fuses them on loading.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.layers.recipes import scaled_residual
from pipeline.models import mup
from pipeline.models.decoder_mapping import ATTENTION, BALANCE_LOSS, EXPERT_KEYS, EXPERTS, MLP, NORMS, decoder_mapping, decoder_table
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import BlockTensors, KeyGroup, Table, refusal
from pipeline.models.shared_sizes import RotaryMoEConfig, is_marked


@dataclass(frozen=True)
class SparseBlocksConfig(
    RotaryMoEConfig,
    layers=48,
    hidden=2048,
    kv_heads=4,
    head_width=128,
    experts=128,
    norm_topk_prob=True,
    vocab_size=151936,
    max_positions=40960,
    norm_eps=1e-6,
    rope_theta=1e6,
):
    """Fields of a decoder with norms of queries and keys, and with many fine-grained experts; some blocks may be dense."""

    query_key_norm: ClassVar[bool] = True

    expert_ffn_hidden: int = knob(768, "intermediate width of each expert", at_least=1)
    expert_interval: int = knob(1, "the last of each of so many blocks has experts, the others a dense feed-forward", at_least=1)
    dense_blocks: list[int] = knob([], "indices of further blocks with a dense feed-forward")
    ffn_hidden: int = knob(6144, "intermediate width of the feed-forward of dense blocks", at_least=1)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Training settings of this family and their defaults."""
        return {"balance_loss": 0.001, "z_loss": 0.0}

    def has_experts(self, block: int) -> bool:
        """Whether a block has experts instead of a dense feed-forward."""
        return is_marked(block, self.expert_interval) and block not in self.dense_blocks

    def violations(self) -> list[Violation]:
        """See Sizes."""
        rule = f"must be indices of model.layers={self.layers} blocks, counted from 0"
        others = [block for block in self.dense_blocks if not 0 <= block < self.layers]
        wrong = [Violation("model.dense_blocks", self.dense_blocks, rule, f"remove {others}")] if others else []
        return [*super().violations(), *wrong]


@dataclass(frozen=True)
class Qwen3MoeConfig(mup.MupConfig, SparseBlocksConfig, family="qwen3_moe"):
    """Qwen 3's attention and such experts."""


def _build(config: Qwen3MoeConfig) -> Model:
    from pipeline.layers.mlp import GatedMLP
    from pipeline.layers.stack import MoEStack
    from pipeline.models.decoder import decoder, moe

    return decoder(
        config,
        query_key_norm="head",
        mlp=lambda layer: (
            moe(config, config.expert_ffn_hidden, router={"normalize": config.norm_topk_prob})
            if config.has_experts(layer)
            else GatedMLP(config.hidden, config.ffn_hidden, bias=False)
        ),
        stack=MoEStack,
    )


def _read_dense_blocks(content: dict[str, Any]) -> dict[str, Any]:
    """Return dense_blocks, empty without the key."""
    blocks = content.get("mlp_only_layers")
    if blocks is not None and not (isinstance(blocks, list) and all(type(block) is int for block in blocks)):
        raise refusal("mlp_only_layers", blocks, "must be a list of integers", "fix config.json")
    return {"dense_blocks": sorted(set(blocks or []))}


DENSE_BLOCKS = KeyGroup(("mlp_only_layers",), lambda config: {"mlp_only_layers": list(config.dense_blocks)}, _read_dense_blocks)
#: the keys beside Llama's
KEYS = {"moe_intermediate_size": ("expert_ffn_hidden", 768), **EXPERT_KEYS, "decoder_sparse_step": ("expert_interval", 1)}
DEFAULTS = {
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "num_experts": 128,
}


def _table(config: Qwen3MoeConfig) -> Table:
    routed = [(index, index) for index in range(config.layers) if config.has_experts(index)]
    dense = [(index, index) for index in range(config.layers) if not config.has_experts(index)]
    return decoder_table(
        BlockTensors((*ATTENTION, *NORMS, *MLP), lambda _: dense),
        BlockTensors((*ATTENTION, *NORMS, *EXPERTS), lambda _: routed, experts="experts"),
    )


MAPPING = decoder_mapping(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    keys=KEYS,
    constants={"attention_bias": False, "use_sliding_window": False},
    defaults=DEFAULTS,
    nested=(DENSE_BLOCKS,),
    training_keys=BALANCE_LOSS,
    ignored_keys=("sliding_window", "output_router_logits"),  # off, since use_sliding_window is false; a training setting
    table=_table,
)

# Initial weights: GPT-2's recipe; the Qwen team published none.
FAMILY = Family(config=Qwen3MoeConfig, build=_build, initial_std=mup.initial(scaled_residual), rate=mup.rate, huggingface=(MAPPING,))
