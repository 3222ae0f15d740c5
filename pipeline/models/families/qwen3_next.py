"""Qwen3-Next (Qwen Team 2025, https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct): mostly linear attention, and experts.

The fused projections of Qwen3NextForCausalLM hold the rows of one key head after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.layers.recipes import Constant, Init, LogOfUniform, offset_norms
from pipeline.models.config_json_keys import LINEAR, layer_types, partial_rope
from pipeline.models.decoder_mapping import BALANCE_LOSS, INPUT_NORM, LAYER, MLP, NORMS, OUTPUT_NORM, decoder_mapping, decoder_table
from pipeline.models.families import qwen3_moe
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import BlockTensors, KeyGroup, StockTensor, Table, gated_experts, gated_mlp, positive, tensors
from pipeline.models.shared_sizes import PartialRotaryConfig, is_marked

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Qwen3NextConfig(
    PartialRotaryConfig,
    qwen3_moe.Qwen3MoeConfig,
    family="qwen3_next",
    partial_rotary_factor=0.25,
    experts=512,
    top_k=10,
    expert_ffn_hidden=512,
    ffn_hidden=5632,
    max_positions=32768,
    rope_theta=1e7,
):
    """Linear attention in most layers and, at an interval, gated full attention; many fine-grained experts and a gated shared one."""

    heads: int = knob(16, "query heads of the full attention", at_least=1)
    kv_heads: int = knob(2, "key and value heads of the full attention, shared by heads/kv_heads query heads each", at_least=1)
    head_width: int | None = knob(256, "width of a head of the full attention; hidden/heads when null", at_least=2)
    full_attention_interval: int = knob(4, "the last of each of so many layers has full attention, the others linear attention", at_least=1)
    linear_key_heads: int = knob(16, "query and key heads of the linear attention", at_least=1)
    linear_value_heads: int = knob(32, "value heads of the linear attention, a multiple of its key heads", at_least=1)
    linear_key_dim: int = knob(128, "width of the queries and keys of a head of the linear attention", at_least=1)
    linear_value_dim: int = knob(128, "width of the values of a head of the linear attention", at_least=1)
    linear_kernel: int = knob(4, "tokens that the convolutions of the linear attention read, with the present one", at_least=1)
    shared_ffn_hidden: int = knob(512, "intermediate width of the shared expert", at_least=1)

    def is_full(self, block: int) -> bool:
        """Whether a block has full attention instead of linear attention."""
        return is_marked(block, self.full_attention_interval)

    @property
    def linear_layers(self) -> int:
        """Number of layers with linear attention."""
        return sum(not self.is_full(block) for block in range(self.layers))

    def violations(self) -> list[Violation]:
        """See Sizes."""
        violations = super().violations()
        if self.linear_value_heads % self.linear_key_heads:
            rule = f"must be a multiple of model.linear_key_heads={self.linear_key_heads}"
            violations.append(Violation("model.linear_value_heads", self.linear_value_heads, rule, "choose a multiple"))
        return violations


def _build(config: Qwen3NextConfig) -> Model:
    from pipeline.layers.gated_delta_net import GatedDeltaNet
    from pipeline.layers.mlp import GatedMLP, OutputGate
    from pipeline.layers.moe import SharedExpertMoE
    from pipeline.layers.norm import OffsetRMSNorm
    from pipeline.layers.stack import MoEStack
    from pipeline.models.decoder import decoder, moe

    def linear() -> GatedDeltaNet:
        return GatedDeltaNet(
            config.hidden,
            config.linear_key_heads,
            config.linear_value_heads,
            key_dim=config.linear_key_dim,
            value_dim=config.linear_value_dim,
            kernel=config.linear_kernel,
            eps=config.norm_eps,
        )

    def mlp(layer: int) -> nn.Module:
        if not config.has_experts(layer):
            return GatedMLP(config.hidden, config.ffn_hidden, bias=False)
        routed = moe(config, config.expert_ffn_hidden, router={"normalize": config.norm_topk_prob})
        shared = GatedMLP(config.hidden, config.shared_ffn_hidden, bias=False)
        return SharedExpertMoE(routed, shared, OutputGate(config.hidden))

    return decoder(
        config,
        norm=OffsetRMSNorm,
        query_key_norm="head",
        attention=lambda layer: {"gated": True} if config.is_full(layer) else linear(),
        mlp=mlp,
        stack=MoEStack,
    )


def initial_std(config: Qwen3NextConfig, name: str) -> Init:
    """GPT-2's recipe, since the Qwen team published none, and the stock class's decay rates."""
    if name.endswith("decay_rate_log"):
        return LogOfUniform(0.01, 16.0)
    return Constant(1.0) if name.endswith(("decay_bias", "output_norm.weight")) else offset_norms(config, name)


def _read_head_dim(content: dict[str, Any]) -> dict[str, Any]:
    """Return head_width; the class has 256 without the key, and hidden / heads if it is null or 0."""
    width = content.get("head_dim", 256)
    return {"head_width": None if width is None else positive("head_dim", width)}


def _table(config: Qwen3NextConfig) -> Table:
    attention, linear, mlp, ours = "blocks.{i}.attention", f"{LAYER}.linear_attn", f"{LAYER}.mlp", "blocks.{i}.mlp"
    full_tensors = (
        *tensors(f"{LAYER}.self_attn.q_proj", f"{attention}.query", f"{attention}.gate", interleaved="heads"),
        *tensors(f"{LAYER}.self_attn.k_proj", f"{attention}.key"),
        *tensors(f"{LAYER}.self_attn.v_proj", f"{attention}.value"),
        *tensors(f"{LAYER}.self_attn.o_proj", f"{attention}.output"),
        *NORMS,
    )
    projections = [f"{attention}.{name}" for name in ("query", "key", "value", "gate")]
    linear_tensors = (
        StockTensor(f"{linear}.dt_bias", (f"{attention}.decay_bias",)),
        StockTensor(f"{linear}.A_log", (f"{attention}.decay_rate_log",)),
        StockTensor(f"{linear}.conv1d.weight", tuple(f"{attention}.{name}_conv" for name in ("query", "key", "value"))),
        *tensors(f"{linear}.in_proj_qkvz", *projections, interleaved="linear_key_heads"),
        *tensors(f"{linear}.in_proj_ba", f"{attention}.beta", f"{attention}.decay", interleaved="linear_key_heads"),
        *tensors(f"{linear}.norm", f"{attention}.output_norm"),
        *tensors(f"{linear}.out_proj", f"{attention}.output"),
    )
    moe_tensors = (
        *tensors(f"{mlp}.gate", f"{ours}.routed.router"),
        *gated_experts(mlp, f"{ours}.routed"),
        *gated_mlp(f"{mlp}.shared_expert", f"{ours}.shared"),
        *tensors(f"{mlp}.shared_expert_gate", f"{ours}.shared_gate"),
    )

    def of_block(index: int) -> BlockTensors:
        mixer = full_tensors if config.is_full(index) else linear_tensors
        feed_forward = moe_tensors if config.has_experts(index) else MLP
        return BlockTensors((*INPUT_NORM, *OUTPUT_NORM, *mixer, *feed_forward), lambda _: [(index, index)], experts="experts")

    return decoder_table(*(of_block(index) for index in range(config.layers)))


MAPPING = decoder_mapping(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    keys={
        **qwen3_moe.KEYS,
        "shared_expert_intermediate_size": ("shared_ffn_hidden", 512),
        "linear_num_key_heads": ("linear_key_heads", 16),
        "linear_num_value_heads": ("linear_value_heads", 32),
        "linear_key_head_dim": ("linear_key_dim", 128),
        "linear_value_head_dim": ("linear_value_dim", 128),
        "linear_conv_kernel_dim": ("linear_kernel", 4),
    },
    constants={"attention_bias": False},
    defaults={
        **qwen3_moe.DEFAULTS,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "intermediate_size": 5632,
        "moe_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
    },
    rope=partial_rope(share=0.25),
    head_width=None,
    nested=(
        KeyGroup(("head_dim",), lambda config: {"head_dim": config.head_dim}, _read_head_dim),
        qwen3_moe.DENSE_BLOCKS,
        layer_types(default=4, interval_key="full_attention_interval", field="full_attention_interval", other=LINEAR),
    ),
    training_keys=BALANCE_LOSS,
    ignored_keys=("output_router_logits",),
    ignored_weights=("mtp.*",),
    table=_table,
)

FAMILY = Family(config=Qwen3NextConfig, build=_build, initial_std=initial_std, huggingface=(MAPPING,))
