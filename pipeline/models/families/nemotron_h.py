"""Nemotron-H (NVIDIA 2025, https://arxiv.org/abs/2504.03624) and Nemotron 3 (https://arxiv.org/abs/2512.20848): Mamba-2 in most blocks.

Every block has one layer alone: Mamba-2, attention without positions, a feed-forward, or experts. NemotronHForCausalLM of transformers;
its files have the names of the authors' first release.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.layers.recipes import Init
from pipeline.models.config_json_keys import number
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import BlockTensors, HuggingFaceMapping, KeyGroup, StockTensor, Table, positive, refusal, tensors
from pipeline.models.shared_sizes import ExpertsConfig, WideHeadConfig, shortest_pattern
from pipeline.models.state_space import StateSpaceConfig, mamba, mamba_std, mamba_tensors

if TYPE_CHECKING:
    from torch import nn

    from pipeline.layers.mamba2 import Mamba2


@dataclass(frozen=True)
class NemotronHConfig(
    StateSpaceConfig,
    ExpertsConfig,
    WideHeadConfig,
    family="nemotron_h",
    layers=52,
    kv_heads=8,
    head_width=128,
    ffn_hidden=21504,
    vocab_size=131072,
    max_positions=8192,
    top_k=6,
):
    """Blocks of one layer each: Mamba-2 (M), attention without positions (*), a feed-forward with squared ReLU (-), experts of such (E)."""

    mamba_groups: int = knob(8, "groups of heads of a Mamba-2 layer; those of a group share queries and keys", at_least=1)
    mamba_smallest_step: float = knob(0.001, "lower bound of the steps of a Mamba-2 layer", at_least=0)
    expert_ffn_hidden: int = knob(1856, "intermediate width of each expert", at_least=1)
    shared_ffn_hidden: int = knob(3712, "intermediate width of the shared expert", at_least=1)
    groups: int = knob(1, "groups of routed experts", at_least=1)
    topk_group: int = knob(1, "groups that a token's experts are selected from", at_least=1)
    norm_topk_prob: bool = knob(True, "normalize the weights of a token's experts to sum to routed_scaling_factor")
    routed_scaling_factor: float = knob(1.0, "factor of the routed experts' weights", above=0)
    experts: int = knob(0, "experts of each block of kind E; 0 without such blocks", at_least=0)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Training settings of this family and their defaults."""
        return {"balance_loss": 0.0001, "bias_update_speed": 0.001} if self.experts else {}

    def violations(self) -> list[Violation]:
        """See Sizes."""
        violations = [violation for violation in super().violations() if self.experts or violation.key != "model.top_k"]
        if wrong := self.pattern_violations("M*-E"):
            return [*wrong, *violations]
        if bool(self.experts) != bool(self.blocks_of("E")):
            rule = f"does not fit model.layer_pattern={self.layer_pattern}: blocks of kind E have experts"
            violations.append(Violation("model.experts", self.experts, rule, "set it to 0 without such blocks, and to their number else"))
        if self.mamba_heads % self.mamba_groups:
            rule = f"must be a multiple of model.mamba_groups={self.mamba_groups}"
            violations.append(Violation("model.mamba_heads", self.mamba_heads, rule, "choose a multiple"))
        if self.experts % self.groups:
            rule = f"must divide model.experts={self.experts}"
            violations.append(Violation("model.groups", self.groups, rule, "choose a divisor of model.experts"))
        return violations


def _build(config: NemotronHConfig) -> Model:
    from pipeline.layers.mlp import MLP
    from pipeline.layers.moe import SharedExpertMoE
    from pipeline.layers.stack import BiasedMoEStack, Stack
    from pipeline.models.decoder import biased_router, decoder, moe

    def mixer(layer: int) -> dict[str, Any] | Mamba2 | None:
        if config.kind(layer) == "M":
            return mamba(config, config.mamba_groups, smallest_step=config.mamba_smallest_step)
        return {} if config.kind(layer) == "*" else None

    def feed_forward(layer: int) -> nn.Module | None:
        if config.kind(layer) == "-":
            return MLP(config.hidden, config.ffn_hidden, bias=False, activation="relu2")
        if config.kind(layer) != "E":
            return None
        routed = moe(config, config.expert_ffn_hidden, router=biased_router(config), experts={"activation": "relu2", "gated": False})
        return SharedExpertMoE(routed, MLP(config.hidden, config.shared_ffn_hidden, bias=False, activation="relu2"))

    return decoder(config, attention=mixer, mlp=feed_forward, stack=BiasedMoEStack if config.experts else Stack)


def initial_std(config: NemotronHConfig, name: str) -> Init:
    """The same; each block adds to the residual stream once."""
    residual = name.endswith(("attention.output.weight", "down.weight", "experts.down"))
    return config.init_std / math.sqrt(config.layers) if residual else mamba_std(config, name)


def _table(config: NemotronHConfig) -> Table:
    layer, mixer, mlp = "backbone.layers.{i}", "backbone.layers.{i}.mixer", "blocks.{i}.mlp"

    def where(kind: str) -> Callable[[Any], list[tuple[int, int]]]:
        return lambda _: [(block, block) for block in config.blocks_of(kind)]

    before, of_mlp = tensors(f"{layer}.norm", "blocks.{i}.attention_norm"), tensors(f"{layer}.norm", "blocks.{i}.mlp_norm")
    projections = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
    attention = [entry for name, ours in projections.items() for entry in tensors(f"{mixer}.{name}", f"blocks.{{i}}.attention.{ours}")]
    experts = (
        *tensors(f"{mixer}.gate", f"{mlp}.routed.router"),
        StockTensor(f"{mixer}.gate.e_score_correction_bias", (f"{mlp}.routed.router.bias",)),
        *(StockTensor(f"{mixer}.experts.{{e}}.{name}_proj.weight", (f"{mlp}.routed.experts.{name}",)) for name in ("up", "down")),
        *(entry for name in ("up", "down") for entry in tensors(f"{mixer}.shared_experts.{name}_proj", f"{mlp}.shared.{name}")),
    )
    return (
        *tensors("backbone.embeddings", "embed.tokens"),
        BlockTensors((*before, *mamba_tensors(mixer)), where("M")),
        BlockTensors((*before, *attention), where("*")),
        BlockTensors((*of_mlp, *tensors(f"{mixer}.up_proj", f"{mlp}.up"), *tensors(f"{mixer}.down_proj", f"{mlp}.down")), where("-")),
        BlockTensors((*of_mlp, *experts), where("E"), experts="experts"),
        *tensors("backbone.norm_f", "norm"),
        *tensors("lm_head", "head"),
    )


#: letter -> the kind of a block in config.json, first as it is written
KINDS = {"M": ("linear_attention", "mamba"), "*": ("full_attention", "attention"), "-": ("mlp",), "E": ("moe",)}


def _read_pattern(content: dict[str, Any]) -> dict[str, Any]:
    """Return the pattern: the earlier key is a string of our letters, and takes effect without the list."""
    key = next((key for key in ("layers_block_type", "layer_types") if content.get(key) is not None), "hybrid_override_pattern")
    kinds = content.get(key)
    letters = {name: letter for letter, names in KINDS.items() for name in names} | {letter: letter for letter in KINDS}
    if kinds is not None and not (isinstance(kinds, str | list) and kinds and all(kind in letters for kind in kinds)):
        raise refusal(key, kinds, f"must be a list of {', '.join(names[0] for names in KINDS.values())}, or a string of {' '.join(KINDS)}")
    pattern = "ME*-" if kinds is None else "".join(letters[kind] for kind in kinds)
    experts = content.get("n_routed_experts", content.get("num_local_experts", 8)) if "E" in pattern else 0
    return {"layers": len(pattern), "layer_pattern": shortest_pattern(pattern), "experts": experts}


def _write_pattern(config: NemotronHConfig) -> dict[str, Any]:
    """Return the list, and the earlier key."""
    letters = [config.kind(block) for block in range(config.layers)]
    experts = {"n_routed_experts": config.experts} if config.experts else {}
    kinds = {"layers_block_type": [KINDS[letter][0] for letter in letters], "hybrid_override_pattern": "".join(letters)}
    return {**kinds, "num_hidden_layers": config.layers, **experts}


#: key -> an earlier key, which the class prefers
_RENAMED = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "time_step_min": "mamba_dt_min",
    "use_conv_bias": "mamba_conv_bias",
}


def _read_mamba(content: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the keys that have earlier names."""
    defaults = {"n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001, "use_conv_bias": True}
    values = {key: content.get(earlier, content.get(key, defaults[key])) for key, earlier in _RENAMED.items()}
    if values["use_conv_bias"] is not True:
        raise refusal("use_conv_bias", values["use_conv_bias"], "is not supported by this family; only true is")
    return {
        "mamba_groups": positive("n_groups", values["n_groups"]),
        "mamba_kernel": positive("conv_kernel", values["conv_kernel"]),
        "mamba_smallest_step": number("time_step_min", values["time_step_min"]),
    }


def _write_mamba(config: NemotronHConfig) -> dict[str, Any]:
    """Return the present keys."""
    sizes = {"n_groups": config.mamba_groups, "conv_kernel": config.mamba_kernel}
    return {**sizes, "time_step_min": config.mamba_smallest_step, "use_conv_bias": True}


MAPPING = HuggingFaceMapping(
    architecture="NemotronHForCausalLM",
    model_type="nemotron_h",
    keys={
        "vocab_size": ("vocab_size", 131072),
        "max_position_embeddings": ("max_positions", 4096),
        "hidden_size": ("hidden", 4096),
        "num_attention_heads": ("heads", 32),
        "num_key_value_heads": (
            "kv_heads",
            lambda content: content.get("num_attention_heads", 32) if "num_key_value_heads" in content else 8,
        ),
        "head_dim": ("head_width", 128),
        "intermediate_size": ("ffn_hidden", 21504),
        "layer_norm_epsilon": ("norm_eps", 1e-5),
        "initializer_range": ("init_std", 0.02),
        "mamba_num_heads": ("mamba_heads", 128),
        "mamba_head_dim": ("mamba_head_dim", 64),
        "ssm_state_size": ("mamba_state", 128),
        "num_experts_per_tok": ("top_k", 2),
        "moe_intermediate_size": ("expert_ffn_hidden", 7688),
        "moe_shared_expert_intermediate_size": ("shared_ffn_hidden", 7688),
        "n_group": ("groups", 1),
        "topk_group": ("topk_group", 1),
        "norm_topk_prob": ("norm_topk_prob", True),
        "routed_scaling_factor": ("routed_scaling_factor", 1.0),
    },
    constants={
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "attention_dropout": 0.0,
        "sliding_window": None,
        "moe_latent_size": None,
        "use_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    },
    implied={"tie_embeddings": False},
    nested=(
        KeyGroup(
            ("layers_block_type", "layer_types", "hybrid_override_pattern", "num_hidden_layers", "n_routed_experts", "num_local_experts"),
            _write_pattern,
            _read_pattern,
        ),
        KeyGroup((*_RENAMED, *_RENAMED.values()), _write_mamba, _read_mamba),
    ),
    # The size of chunks changes the order of sums alone, the bounds of the steps but the lower one serve initial weights, as do the others.
    ignored_keys=(
        *(
            "chunk_size",
            "mamba_chunk_size",
            "use_mamba_kernels",
            "num_logits_to_keep",
            "rescale_prenorm_residual",
            "expand",
            "mamba_expand",
        ),
        *("time_step_floor", "time_step_limit", "time_step_max", "mamba_dt_init_floor", "mamba_dt_limit", "mamba_dt_max"),
        *("num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern"),  # weights that the class does not load
    ),
    ignored_weights=("mtp.*",),
    renamed=((r"^model\.", "backbone."),),
    table=_table,
)

FAMILY = Family(config=NemotronHConfig, build=_build, initial_std=initial_std, huggingface=(MAPPING,))
