"""Granite 4 (IBM 2025, https://huggingface.co/ibm-granite/granite-4.0-h-small): Granite's block with Mamba-2 in place of most attention.

GraniteMoeHybridForCausalLM of transformers, whose feed-forward is that of a shared expert, alone or beside routed experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.layers.recipes import Init, single_std
from pipeline.models.decoder_mapping import BALANCE_LOSS, INPUT_NORM, LAYER, OUTPUT_NORM, decoder_mapping, decoder_table, projections
from pipeline.models.families.granite import FACTORS, GraniteConfig
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import BlockTensors, KeyGroup, StockTensor, Table, positive, refusal, tensors
from pipeline.models.shared_sizes import ExpertsConfig, shortest_pattern
from pipeline.models.state_space import StateSpaceConfig, mamba, mamba_std, mamba_tensors
from pipeline.models.tensor_parallel_roles import WITH_ONE_GROUP

if TYPE_CHECKING:
    from torch import nn

    from pipeline.layers.mamba2 import Mamba2


@dataclass(frozen=True)
class GraniteHybridConfig(StateSpaceConfig, ExpertsConfig, GraniteConfig, family="granite_hybrid", layer_pattern="MMMMM*MMMM", top_k=10):
    """Granite's block with Mamba-2 (M) or attention (*), and a feed-forward, alone or beside experts."""

    ffn_hidden: int = knob(1536, "intermediate width of the feed-forward, the shared expert", at_least=1)
    experts: int = knob(0, "routed experts of each block; 0 for none", at_least=0)
    expert_ffn_hidden: int = knob(768, "intermediate width of each of them", at_least=1)
    rotary: bool = knob(False, "rotary positions in attention; else it has no positions")

    @property
    def loss_weights(self) -> dict[str, float]:
        """Training settings of this family and their defaults."""
        return {"balance_loss": 0.001, "z_loss": 0.0} if self.experts else {}

    def violations(self) -> list[Violation]:
        """See Sizes."""
        violations = [violation for violation in super().violations() if self.experts or violation.key != "model.top_k"]
        if self.mamba_heads * self.mamba_head_dim % self.hidden:
            rule = f"times model.mamba_head_dim={self.mamba_head_dim} must be a multiple of model.hidden={self.hidden}"
            violations.append(Violation("model.mamba_heads", self.mamba_heads, rule, "choose other heads, or another width of them"))
        return [*self.pattern_violations("M*"), *violations]


def _build(config: GraniteHybridConfig) -> Model:
    from pipeline.layers.mlp import GatedMLP
    from pipeline.layers.moe import SharedExpertMoE
    from pipeline.layers.stack import MoEStack, Stack
    from pipeline.models.decoder import decoder, moe

    def mixer(layer: int) -> dict[str, Any] | Mamba2:
        if config.kind(layer) == "M":
            return mamba(config, 1)
        return {"scale": config.attention_multiplier, "rope": "global" if config.rotary else "none"}

    def feed_forward(_: int) -> nn.Module:
        shared = GatedMLP(config.hidden, config.ffn_hidden, bias=False)
        # Its scores are a softmax over the chosen experts.
        return SharedExpertMoE(moe(config, config.expert_ffn_hidden, router={"normalize": True}), shared) if config.experts else shared

    return decoder(
        config,
        attention=mixer,
        mlp=feed_forward,
        block=lambda _: {"residual_factor": config.residual_multiplier},
        embed={"factor": config.embedding_multiplier},
        head={"factor": 1 / config.logits_scaling},
        stack=MoEStack if config.experts else Stack,
    )


def initial_std(config: GraniteHybridConfig, name: str) -> Init:
    """Granite's recipe, and that of Mamba-2."""
    return mamba_std(config, name) if ".attention." in name and not name.endswith("weight") else single_std(config, name)


def _table(config: GraniteHybridConfig) -> Table:
    mlp = "blocks.{i}.mlp"
    shared = f"{mlp}.shared" if config.experts else mlp
    feed_forward: tuple[StockTensor, ...] = (
        *INPUT_NORM,
        *OUTPUT_NORM,
        *tensors(f"{LAYER}.shared_mlp.input_linear", f"{shared}.gate", f"{shared}.up"),
        *tensors(f"{LAYER}.shared_mlp.output_linear", f"{shared}.down"),
    )
    if config.experts:
        moe, experts = f"{LAYER}.block_sparse_moe", f"{mlp}.routed.experts"
        feed_forward += (
            *tensors(f"{moe}.router.layer", f"{mlp}.routed.router"),
            StockTensor(f"{moe}.input_linear.weight", (f"{experts}.gate", f"{experts}.up"), stacked=True),
            StockTensor(f"{moe}.output_linear.weight", (f"{experts}.down",), stacked=True),
        )
    kinds = {"M": mamba_tensors(f"{LAYER}.mamba"), "*": projections()}

    def of_block(block: int) -> BlockTensors:
        return BlockTensors((*kinds[config.kind(block)], *feed_forward), lambda _: [(block, block)])

    return decoder_table(*(of_block(block) for block in range(config.layers)))


#: kind of a layer in config.json -> our letter
_KINDS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"}


def _read_layers(content: dict[str, Any]) -> dict[str, Any]:
    """Return the pattern; without the key all layers are Mamba-2's."""
    key = "layers_block_type" if content.get("layer_types") is None and content.get("layers_block_type") is not None else "layer_types"
    kinds, layers = content.get(key), content.get("num_hidden_layers", 32)
    if kinds is None:
        return {"layer_pattern": "M"}
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in _KINDS for kind in kinds):
        raise refusal(key, kinds, f"must be a list of num_hidden_layers={layers} entries, mamba or attention", "correct config.json")
    return {"layer_pattern": shortest_pattern("".join(_KINDS[kind] for kind in kinds))}


def _write_layers(config: GraniteHybridConfig) -> dict[str, Any]:
    """Return the kinds by their names in released files, which the class renames."""
    return {"layer_types": ["mamba" if config.kind(block) == "M" else "attention" for block in range(config.layers)]}


def _read_widths(content: dict[str, Any]) -> dict[str, Any]:
    """Return the width of a head, and verify what must follow from it."""
    defaults = {"hidden_size": 4096, "mamba_n_heads": 128, "mamba_expand": 2}
    hidden, heads, expand = (positive(key, content.get(key, default)) for key, default in defaults.items())
    width = content.get("mamba_d_head", "auto")
    width = expand * hidden // heads if width == "auto" else positive("mamba_d_head", width)
    if width * heads != expand * hidden:
        raise refusal(
            "mamba_d_head", width, f"times mamba_n_heads={heads} must be mamba_expand={expand} times hidden_size={hidden}", "fix it"
        )
    infinite = (math.inf, {"__float__": "Infinity"})  # as transformers writes it
    if (limits := content.get("time_step_limit", [0.0, math.inf])) not in ([0.0, infinity] for infinity in infinite):
        raise refusal("time_step_limit", limits, "is not supported by this family; only [0.0, Infinity] is")
    return {"mamba_head_dim": width}


def _write_widths(config: GraniteHybridConfig) -> dict[str, Any]:
    """Return the width of a head, and the ratio of all heads to the residual stream, which the class requires to be an integer."""
    return {"mamba_d_head": config.mamba_head_dim, "mamba_expand": config.mamba_heads * config.mamba_head_dim // config.hidden}


def _read_experts(content: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of experts; without experts, files have 0 of each, and the second one has no effect."""
    if (experts := content.get("num_local_experts", 8)) == 0 and not isinstance(experts, bool):
        return {"experts": 0}
    return {
        "experts": positive("num_local_experts", experts),
        "top_k": positive("num_experts_per_tok", content.get("num_experts_per_tok", 2)),
    }


def _write_experts(config: GraniteHybridConfig) -> dict[str, Any]:
    """Return them."""
    return {"num_local_experts": config.experts, "num_experts_per_tok": config.top_k if config.experts else 0}


MAPPING = decoder_mapping(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    keys={
        **{key: (key, 1.0) for key in FACTORS},
        "intermediate_size": ("expert_ffn_hidden", 11008),
        "shared_intermediate_size": ("ffn_hidden", 1024),
        "mamba_n_heads": ("mamba_heads", 128),
        "mamba_d_state": ("mamba_state", 256),
        "mamba_d_conv": ("mamba_kernel", 4),
    },
    constants={"attention_bias": False, "mamba_n_groups": 1, "mamba_conv_bias": True, "mamba_proj_bias": False},
    head_width=None,
    nested=(
        KeyGroup(("layer_types", "layers_block_type"), _write_layers, _read_layers),
        KeyGroup(("mamba_d_head", "mamba_expand", "time_step_limit"), _write_widths, _read_widths),
        KeyGroup(("num_local_experts", "num_experts_per_tok"), _write_experts, _read_experts),
        KeyGroup(
            ("position_embedding_type",),
            lambda config: {"position_embedding_type": "rope" if config.rotary else "nope"},
            lambda content: {"rotary": content.get("position_embedding_type") == "rope"},
        ),
    ),
    implied={"head_width": None},
    training_keys=BALANCE_LOSS,
    ignored_keys=("output_router_logits", "mamba_chunk_size"),
    renamed=(
        (r"block_sparse_moe\.experts\.gate_up_proj$", "block_sparse_moe.input_linear.weight"),
        (r"block_sparse_moe\.experts\.down_proj$", "block_sparse_moe.output_linear.weight"),
        (r"block_sparse_moe\.router\.weight$", "block_sparse_moe.router.layer.weight"),
    ),
    table=_table,
)

FAMILY = Family(config=GraniteHybridConfig, build=_build, initial_std=initial_std, huggingface=(MAPPING,), tensor_parallel=WITH_ONE_GROUP)
