"""Qwen3-Next (Qwen Team 2025, https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct): mostly linear attention, and experts.

The fused projections of Qwen3NextForCausalLM hold the rows of one key head after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.common.knobs import knob
from pipeline.layers.recipes import Constant, Init, LogOfUniform, offset_norms
from pipeline.models.config_json_keys import LINEAR, layer_types, partial_rope
from pipeline.models.decoder_mapping import BALANCE_LOSS, INPUT_NORM, LAYER, MLP, NORMS, OUTPUT_NORM, decoder_mapping, decoder_table
from pipeline.models.families import qwen3_moe
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import BlockTensors, KeyGroup, StockTensor, Table, gated_experts, gated_mlp, positive, tensors
from pipeline.models.shared_sizes import LinearAttentionConfig, PartialRotaryConfig

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Qwen3NextConfig(
    PartialRotaryConfig,
    LinearAttentionConfig,
    qwen3_moe.SparseBlocksConfig,
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

    shared_ffn_hidden: int = knob(512, "intermediate width of the shared expert", at_least=1)


def hybrid(config: Any, **arguments: Any) -> Model:
    """Build a decoder with linear attention in most layers and gated full attention; the arguments are those of `decoder`."""
    from pipeline.layers.norm import OffsetRMSNorm
    from pipeline.models.decoder import decoder, linear_attention

    return decoder(
        config,
        norm=OffsetRMSNorm,
        query_key_norm="head",
        attention=lambda layer: {"gated": True} if config.is_full(layer) else linear_attention(config),
        **arguments,
    )


def shared_expert_moe(config: Any, ffn_hidden: int, *, normalize: bool) -> nn.Module:
    """Build a MoE layer with a gated shared expert.

    Args:
        config: with the fields of ExpertsConfig, and shared_ffn_hidden.
        ffn_hidden: intermediate width of each routed expert.
        normalize: whether the weights of a token's experts sum to one.
    """
    from pipeline.layers.mlp import GatedMLP, OutputGate
    from pipeline.layers.moe import SharedExpertMoE
    from pipeline.models.decoder import moe

    shared = GatedMLP(config.hidden, config.shared_ffn_hidden, bias=False)
    return SharedExpertMoE(moe(config, ffn_hidden, router={"normalize": normalize}), shared, OutputGate(config.hidden))


def _build(config: Qwen3NextConfig) -> Model:
    from pipeline.layers.mlp import GatedMLP
    from pipeline.layers.stack import MoEStack

    def mlp(layer: int) -> nn.Module:
        if not config.has_experts(layer):
            return GatedMLP(config.hidden, config.ffn_hidden, bias=False)
        return shared_expert_moe(config, config.expert_ffn_hidden, normalize=config.norm_topk_prob)

    return hybrid(config, mlp=mlp, stack=MoEStack)


def initial_std(config: Any, name: str) -> Init:
    """GPT-2's recipe, since the Qwen team published none, and the stock class's decay rates."""
    if name.endswith("decay_rate_log"):
        return LogOfUniform(0.01, 16.0)
    return Constant(1.0) if name.endswith(("decay_bias", "output_norm.weight")) else offset_norms(config, name)


def _read_head_dim(content: dict[str, Any]) -> dict[str, Any]:
    """Return head_width; the class has 256 without the key, and hidden / heads if it is null or 0."""
    width = content.get("head_dim", 256)
    return {"head_width": None if width is None else positive("head_dim", width)}


_MLP, _OURS = f"{LAYER}.mlp", "blocks.{i}.mlp"
#: experts, with a gated shared one
SHARED_EXPERT_MOE = (
    *tensors(f"{_MLP}.gate", f"{_OURS}.routed.router"),
    *gated_experts(_MLP, f"{_OURS}.routed"),
    *gated_mlp(f"{_MLP}.shared_expert", f"{_OURS}.shared"),
    *tensors(f"{_MLP}.shared_expert_gate", f"{_OURS}.shared_gate"),
)
MIXER, LINEAR_MIXER = "blocks.{i}.attention", f"{LAYER}.linear_attn"


def hybrid_table(config: Any, inputs: tuple[StockTensor, ...], feed_forward: Callable[[int], tuple[StockTensor, ...]]) -> Table:
    """Return the tensors of such a decoder.

    Args:
        config: with the fields of LinearAttentionConfig.
        inputs: the projections of the inputs of the linear attention.
        feed_forward: index of a block -> its feed-forward.
    """
    full = (
        *tensors(f"{LAYER}.self_attn.q_proj", f"{MIXER}.query", f"{MIXER}.gate", interleaved="heads"),
        *tensors(f"{LAYER}.self_attn.k_proj", f"{MIXER}.key"),
        *tensors(f"{LAYER}.self_attn.v_proj", f"{MIXER}.value"),
        *tensors(f"{LAYER}.self_attn.o_proj", f"{MIXER}.output"),
        *NORMS,
    )
    linear = (
        StockTensor(f"{LINEAR_MIXER}.dt_bias", (f"{MIXER}.decay_bias",)),
        StockTensor(f"{LINEAR_MIXER}.A_log", (f"{MIXER}.decay_rate_log",)),
        StockTensor(f"{LINEAR_MIXER}.conv1d.weight", tuple(f"{MIXER}.{name}_conv" for name in ("query", "key", "value"))),
        *inputs,
        *tensors(f"{LINEAR_MIXER}.norm", f"{MIXER}.output_norm"),
        *tensors(f"{LINEAR_MIXER}.out_proj", f"{MIXER}.output"),
    )

    def of_block(index: int) -> BlockTensors:
        mixer = full if config.is_full(index) else linear
        return BlockTensors((*INPUT_NORM, *OUTPUT_NORM, *mixer, *feed_forward(index)), lambda _: [(index, index)], experts="experts")

    return decoder_table(*(of_block(index) for index in range(config.layers)))


def _table(config: Qwen3NextConfig) -> Table:
    inputs = (
        *tensors(
            f"{LINEAR_MIXER}.in_proj_qkvz",
            *(f"{MIXER}.{name}" for name in ("query", "key", "value", "gate")),
            interleaved="linear_key_heads",
        ),
        *tensors(f"{LINEAR_MIXER}.in_proj_ba", f"{MIXER}.beta", f"{MIXER}.decay", interleaved="linear_key_heads"),
    )
    return hybrid_table(config, inputs, lambda index: SHARED_EXPERT_MOE if config.has_experts(index) else MLP)


#: the keys of the linear attention
LINEAR_KEYS = {
    "linear_num_key_heads": ("linear_key_heads", 16),
    "linear_num_value_heads": ("linear_value_heads", 32),
    "linear_key_head_dim": ("linear_key_dim", 128),
    "linear_value_head_dim": ("linear_value_dim", 128),
    "linear_conv_kernel_dim": ("linear_kernel", 4),
}
HEAD_DIM = KeyGroup(("head_dim",), lambda config: {"head_dim": config.head_dim}, _read_head_dim)
LAYER_TYPES = layer_types(default=4, interval_key="full_attention_interval", field="full_attention_interval", other=LINEAR)
MAPPING = decoder_mapping(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    keys={
        **qwen3_moe.KEYS,
        "shared_expert_intermediate_size": ("shared_ffn_hidden", 512),
        **LINEAR_KEYS,
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
        HEAD_DIM,
        qwen3_moe.DENSE_BLOCKS,
        LAYER_TYPES,
    ),
    training_keys=BALANCE_LOSS,
    ignored_keys=("output_router_logits",),
    ignored_weights=("mtp.*",),
    table=_table,
)

FAMILY = Family(config=Qwen3NextConfig, build=_build, initial_std=initial_std, huggingface=(MAPPING,))
