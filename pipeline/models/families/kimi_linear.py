"""Kimi Linear (Kimi Team 2025, https://arxiv.org/abs/2510.26692): Kimi Delta Attention, latent attention without positions, and experts.

KimiLinearForCausalLM of transformers; its files have the names of the authors' release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.layers.recipes import Init, InverseSoftplus, LogOfUniform, single_std
from pipeline.models.config_json_keys import GLOBAL, LINEAR
from pipeline.models.decoder_mapping import INPUT_NORM, LAYER, MLP, NO_PADDING, OUTPUT_NORM, decoder_table
from pipeline.models.families.deepseek_v3 import LatentAttentionConfig, latent_attention, latent_tensors, shared_expert_moe
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import (
    BlockTensors,
    HuggingFaceMapping,
    KeyGroup,
    StockTensor,
    Table,
    gated_mlp,
    positive,
    refusal,
    tensors,
)
from pipeline.models.shared_sizes import BiasedExpertsConfig, LayerPatternConfig, shortest_pattern


@dataclass(frozen=True)
class KimiLinearConfig(
    LayerPatternConfig,
    LatentAttentionConfig,
    BiasedExpertsConfig,
    family="kimi_linear",
    layer_pattern="KKK*",
    layers=27,
    hidden=2304,
    heads=32,
    q_lora_rank=None,
    vocab_size=163840,
    norm_eps=1e-5,
    init_std=0.02,
    dense_layers=1,
    ffn_hidden=9216,
    expert_ffn_hidden=1024,
    groups=1,
    topk_group=1,
    routed_scaling_factor=2.446,
):
    """Kimi Delta Attention (K), or multi-head latent attention without positions (*), and DeepSeek-V3's experts."""

    linear_heads: int = knob(32, "heads of Kimi Delta Attention", at_least=1)
    linear_head_dim: int = knob(128, "width of a head of Kimi Delta Attention, and rank of its decays and gates", at_least=2)
    linear_kernel: int = knob(4, "tokens that the convolutions of Kimi Delta Attention read, with the present one", at_least=1)

    @property
    def linear_layers(self) -> int:
        """Number of layers with a recurrent state."""
        return len(self.blocks_of("K"))

    @property
    def linear_key_heads(self) -> int:
        """Query and key heads of these layers, as in LinearAttentionConfig."""
        return self.linear_heads

    @property
    def linear_key_dim(self) -> int:
        """Width of their queries and keys, as there."""
        return self.linear_head_dim

    def is_full(self, block: int) -> bool:
        """Whether a block has full attention instead of linear attention."""
        return self.kind(block) == "*"

    def violations(self) -> list[Violation]:
        """See Sizes."""
        return [*self.pattern_violations("K*"), *super().violations()]


def _build(config: KimiLinearConfig) -> Model:
    from functools import partial

    from pipeline.layers.gated_delta_net import KimiDeltaAttention
    from pipeline.layers.mlp import GatedMLP
    from pipeline.layers.stack import BiasedMoEStack
    from pipeline.models.decoder import decoder

    linear = partial(KimiDeltaAttention, config.hidden, config.linear_heads, config.linear_head_dim)
    dense = partial(GatedMLP, config.hidden, config.ffn_hidden, bias=False)
    return decoder(
        config,
        attention=lambda i: latent_attention(config) if config.is_full(i) else linear(kernel=config.linear_kernel, eps=config.norm_eps),
        mlp=lambda i: dense() if i < config.dense_layers else shared_expert_moe(config),
        stack=BiasedMoEStack,
    )


def initial_std(config: KimiLinearConfig, name: str) -> Init:
    """The stock class's recipe: one standard deviation, and Mamba's decay rates and steps. The paper has none."""
    if name.endswith("decay_rate_log"):
        return LogOfUniform(1.0, 16.0)
    return InverseSoftplus(0.001, 0.1) if name.endswith("decay_bias") else single_std(config, name)


#: The matrices of an expert in the order of their numbers.
_MATRICES = ("gate", "down", "up")


def _table(config: KimiLinearConfig) -> Table:
    mixer, mlp, stock, moe = "blocks.{i}.attention", "blocks.{i}.mlp", f"{LAYER}.self_attn", f"{LAYER}.block_sparse_moe"
    inputs, low_rank = ("query", "key", "value"), {"f_a": "decay_down", "f_b": "decay_up", "g_a": "gate_down", "g_b": "gate_up"}
    projections = {**{name[0]: name for name in inputs}, "b": "beta", "o": "output", **low_rank}
    linear = (
        *INPUT_NORM,
        *(entry for name, ours in projections.items() for entry in tensors(f"{stock}.{name}_proj", f"{mixer}.{ours}")),
        # the class joins them
        *(StockTensor(f"{stock}.{name[0]}_conv1d.weight", (f"{mixer}.{name}_conv",), part_of=f"{stock}.conv1d.weight") for name in inputs),
        StockTensor(f"{stock}.A_log", (f"{mixer}.decay_rate_log",), added_dims=(2, 1)),
        StockTensor(f"{stock}.dt_bias", (f"{mixer}.decay_bias",)),
        *tensors(f"{stock}.o_norm", f"{mixer}.output_norm"),
        *OUTPUT_NORM,
    )
    experts = (
        *tensors(f"{moe}.gate", f"{mlp}.routed.router"),
        StockTensor(f"{moe}.gate.e_score_correction_bias", (f"{mlp}.routed.router.bias",)),
        *(StockTensor(f"{moe}.experts.{{e}}.w{i}.weight", (f"{mlp}.routed.experts.{ours}",)) for i, ours in enumerate(_MATRICES, 1)),
        *gated_mlp(f"{moe}.shared_experts", f"{mlp}.shared"),
    )

    def of_block(block: int) -> BlockTensors:
        attention = latent_tensors("blocks.{i}", config) if config.is_full(block) else linear
        return BlockTensors((*attention, *(MLP if block < config.dense_layers else experts)), lambda _: [(block, block)], experts="experts")

    return decoder_table(*(of_block(block) for block in range(config.layers)))


#: Keys of linear_attn_config -> the keys that it precedes, our fields, and the defaults.
_SIZES = {
    "head_dim": ("linear_head_dim", "linear_head_dim", 128),
    "num_heads": ("linear_num_heads", "linear_heads", 32),
    "short_conv_kernel_size": ("linear_conv_kernel_dim", "linear_kernel", 4),
}
#: Lists there of the layers with full attention, and of the others, counted from 1.
_PLACES = ("full_attn_layers", "kda_layers")
_LETTERS = {LINEAR: "K", GLOBAL: "*"}


def _read_linear(content: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes of Kimi Delta Attention, and the pattern: that of layer_types, or the one in linear_attn_config."""
    stated, layers, kinds = content.get("linear_attn_config", {}), content.get("num_hidden_layers", 27), content.get("layer_types")
    if not isinstance(stated, dict):
        raise refusal("linear_attn_config", stated, "must be an object", "fix config.json")
    for name in sorted(stated.keys() - {*_SIZES, *_PLACES}):  # such as bounds of the decays, of later models
        raise refusal(f"linear_attn_config.{name}", stated[name], "is not supported by this family")
    if kinds is not None:
        if not (isinstance(kinds, list) and len(kinds) == layers and all(kind in (LINEAR, GLOBAL) for kind in kinds)):
            raise refusal("layer_types", kinds, f"must be a list of num_hidden_layers={layers} entries, {LINEAR} or {GLOBAL}", "fix it")
        pattern = "".join(_LETTERS[kind] for kind in kinds)
    elif stated.keys() >= {*_PLACES}:
        places = [stated[name] for name in _PLACES]
        expected = sorted(map(repr, range(1, layers + 1)))
        if not all(isinstance(x, list) for x in places) or sorted(map(repr, places[0] + places[1])) != expected:
            rule = f"must have each number from 1 to num_hidden_layers={layers} in either {' or '.join(_PLACES)}"
            raise refusal("linear_attn_config", stated, rule, "fix config.json")
        pattern = "".join("*" if place in places[0] else "K" for place in range(1, layers + 1))
    else:  # as the class has it, which differs from the release
        pattern = "".join("*" if place and place % 4 == 0 else "K" for place in range(layers))
    sizes = {
        ours: positive(f"linear_attn_config.{name}" if name in stated else key, stated.get(name, content.get(key, default)))
        for name, (key, ours, default) in _SIZES.items()
    }
    return {**sizes, "layer_pattern": shortest_pattern(pattern)}


def _write_linear(config: KimiLinearConfig) -> dict[str, Any]:
    """Return the keys as in released files."""
    full, linear = ([block + 1 for block in config.blocks_of(kind)] for kind in "*K")
    sizes = {name: getattr(config, ours) for name, (_, ours, _) in _SIZES.items()}
    return {"linear_attn_config": {**dict(zip(_PLACES, (full, linear), strict=True)), **sizes}}


def _read_dense(content: dict[str, Any]) -> dict[str, Any]:
    """Return the number of dense blocks, which must be the first ones; the list of kinds precedes the number."""
    layers, kinds, count = content.get("num_hidden_layers", 27), content.get("mlp_layer_types"), content.get("first_k_dense_replace", 1)
    if kinds is not None:
        dense = kinds.count("dense") if isinstance(kinds, list) else 0
        if kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
            rule = f"must be a list of num_hidden_layers={layers} entries in this family, dense ones followed by sparse ones"
            raise refusal("mlp_layer_types", kinds, rule)
        return {"dense_layers": dense}
    if type(count) is not int:
        raise refusal("first_k_dense_replace", count, "must be an integer", "fix config.json")
    return {"dense_layers": min(max(count, 0), layers)}


MAPPING = HuggingFaceMapping(
    architecture="KimiLinearForCausalLM",
    model_type="kimi_linear",
    keys={
        "vocab_size": ("vocab_size", 163840),
        "model_max_length": ("max_positions", 1048576),
        "hidden_size": ("hidden", 2304),
        "num_hidden_layers": ("layers", 27),
        "num_attention_heads": ("heads", 32),
        "num_key_value_heads": (
            "kv_heads",
            lambda content: content.get("num_attention_heads", 32) if "num_key_value_heads" in content else 32,
        ),
        "q_lora_rank": ("q_lora_rank", None),
        "kv_lora_rank": ("kv_lora_rank", 512),
        "qk_nope_head_dim": ("qk_nope_head_dim", 128),
        "qk_rope_head_dim": ("qk_rope_head_dim", 64),
        "v_head_dim": ("v_head_dim", 128),
        "intermediate_size": ("ffn_hidden", 9216),
        "num_experts": ("experts", 256),
        "num_shared_experts": ("shared_experts", 1),
        "moe_intermediate_size": ("expert_ffn_hidden", 1024),
        "num_experts_per_token": ("top_k", 8),
        "num_expert_group": ("groups", 1),
        "topk_group": ("topk_group", 1),
        "moe_renormalize": ("norm_topk_prob", True),
        "routed_scaling_factor": ("routed_scaling_factor", 2.446),
        "rms_norm_eps": ("norm_eps", 1e-5),
        "initializer_range": ("init_std", 0.02),
    },
    constants={
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        # keys of the authors' code, which the class has no other values for
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1,
    },
    implied={"tie_embeddings": False},
    nested=(
        NO_PADDING,
        KeyGroup(("linear_attn_config", "layer_types", *(key for key, _, _ in _SIZES.values())), _write_linear, _read_linear),
        KeyGroup(("first_k_dense_replace", "mlp_layer_types"), lambda config: {"first_k_dense_replace": config.dense_layers}, _read_dense),
    ),
    # A width that the class computes from others, and positions that it does not have.
    ignored_keys=("head_dim", "rope_theta", "rope_scaling", "rope_parameters"),
    renamed=(
        # names of the class, and those that it gives the dense feed-forward in files
        (r"\.self_attn\.forget_gate\.", ".self_attn."),
        (r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj."),
        (r"\.mlp\.(gate|experts|shared_experts)\.", r".block_sparse_moe.\1."),
    ),
    table=_table,
)

FAMILY = Family(config=KimiLinearConfig, build=_build, initial_std=initial_std, huggingface=(MAPPING,))
