"""OLMo Hybrid (Merrill et al. 2026, https://arxiv.org/abs/2604.03444): OLMo 3 with linear attention in place of its windows.

Blocks with linear attention normalize the input of each layer, those with full attention its output. The released model has no positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.layers.recipes import Init, InverseSoftplus, LogOfUniform, single_std
from pipeline.models.config_json_keys import LINEAR, ROPE, as_object, layer_types
from pipeline.models.decoder_mapping import (
    INPUT_NORM,
    LAYER,
    MLP,
    NO_PADDING,
    OUTPUT_NORM,
    OUTPUT_NORM_BLOCK,
    decoder_mapping,
    decoder_table,
)
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import BlockTensors, KeyGroup, StockTensor, refusal, tensors
from pipeline.models.shared_sizes import LinearAttentionConfig, RotaryDecoderConfig
from pipeline.models.tensor_parallel_roles import WITH_WIDTH_NORMS


@dataclass(frozen=True)
class OlmoHybridConfig(
    LinearAttentionConfig,
    RotaryDecoderConfig,
    family="olmo_hybrid",
    hidden=3840,
    heads=30,
    kv_heads=30,
    head_width=None,
    linear_key_heads=30,
    linear_value_heads=30,
    linear_key_dim=96,
    linear_value_dim=192,
    vocab_size=100352,
    max_positions=8192,
    norm_eps=1e-6,
    rope_theta=500000.0,
):
    """Linear attention in most blocks, with norms of inputs; full attention at an interval, as in OLMo 2; SwiGLU."""

    query_key_norm: ClassVar[bool] = True

    rotary: bool = knob(True, "rotary positions in full attention; without them, no layer has positions")
    negative_eigenvalues: bool = knob(True, "beta of the linear attention is from 0 to 2 instead of 0 to 1")

    def violations(self) -> list[Violation]:
        """See Sizes; the Hugging Face class requires both kinds of attention."""
        violations = super().violations()
        if not 1 < self.full_attention_interval <= self.layers:
            rule = f"must be from 2 to model.layers={self.layers}, so that there are layers with linear and with full attention"
            violations.append(Violation("model.full_attention_interval", self.full_attention_interval, rule, "choose another interval"))
        if not self.rotary and self.rope_scaling != "none":
            rule, fix = "scales rotary positions, and there are none with model.rotary=false", "set it to none, or model.rotary=true"
            violations.append(Violation("model.rope_scaling", self.rope_scaling, rule, fix))
        return violations


def _build(config: OlmoHybridConfig) -> Model:
    from pipeline.models.decoder import decoder, linear_attention

    rope = {"rope": "global" if config.rotary else "none"}
    return decoder(
        config,
        norms=lambda layer: "after" if config.is_full(layer) else "before",
        query_key_norm="width",
        # the class has this eps in the norm of the output, whatever norm_eps is
        attention=lambda layer: (
            rope if config.is_full(layer) else linear_attention(config, eps=1e-5, negative_eigenvalues=config.negative_eigenvalues)
        ),
    )


def initial_std(config: OlmoHybridConfig, name: str) -> Init:
    """OLMo 2's recipe, and the stock class's decay rates and step sizes."""
    if name.endswith("decay_rate_log"):
        return LogOfUniform(0.0, 16.0)
    return InverseSoftplus(0.001, 0.1) if name.endswith("decay_bias") else single_std(config, name)


def _write_rope(config: OlmoHybridConfig) -> dict[str, Any]:
    """Return the rotary keys; without positions, the base is null."""
    return ROPE.write(config) if config.rotary else {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": None}}


def _read_rope(content: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary fields.

    Raises:
        UserError: as ROPE; and for null in place of the parameters, which OLMo-core writes for a model without positions, and the class
            reads as a base of 10,000.
    """
    key = "rope_scaling" if content.get("rope_scaling") else "rope_parameters"
    parameters = as_object(key, content.get(key))
    if key in content and content[key] is None and "rope_theta" not in content:
        rule = "means no positions in OLMo-core, and in transformers rotary ones of base 10000"
        raise refusal(key, None, rule, 'set it to {"rope_theta": null} for no positions, else to {"rope_theta": 10000.0}')
    if parameters.get("rope_theta", content.get("rope_theta", 10000.0)) is not None:
        return {**ROPE.read(content), "rotary": True}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default" or parameters.keys() - {"rope_theta", "rope_type", "type"}:
        raise refusal(key, parameters, "scales rotary positions, and rope_theta=null means that there are none")
    return {"rotary": False}


def _read_layer_types(content: dict[str, Any]) -> dict[str, Any]:
    """Return the interval; without the key, the last of at most 4 layers has full attention."""
    if content.get("layer_types") is None:
        return {"full_attention_interval": min(4, content.get("num_hidden_layers", 32))}
    return _LAYER_TYPES.read(content)


_LAYER_TYPES = layer_types(default=4, field="full_attention_interval", other=LINEAR)


def _linear_heads(content: dict[str, Any]) -> int:
    """Return the default of the numbers of heads of the linear attention."""
    heads: int = content.get("num_attention_heads", 30)
    return heads


def _key_dim(content: dict[str, Any]) -> int:
    """Return the default of linear_key_head_dim."""
    return int(0.75 * content.get("hidden_size", 3840) / content.get("linear_num_key_heads", _linear_heads(content)))


_MIXER, _STOCK = "blocks.{i}.attention", f"{LAYER}.linear_attn"
_PROJECTIONS = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "g_proj": "gate", "b_proj": "beta", "a_proj": "decay"}
_LINEAR_BLOCK = (
    *INPUT_NORM,
    *(entry for stock, ours in _PROJECTIONS.items() for entry in tensors(f"{_STOCK}.{stock}", f"{_MIXER}.{ours}")),
    # transformers 5 joins them, and saves three equal parts
    *(
        StockTensor(f"{_STOCK}.{name[0]}_conv1d.weight", (f"{_MIXER}.{name}_conv",), part_of=f"{_STOCK}.conv1d.weight")
        for name in ("query", "key", "value")
    ),
    StockTensor(f"{_STOCK}.A_log", (f"{_MIXER}.decay_rate_log",)),
    StockTensor(f"{_STOCK}.dt_bias", (f"{_MIXER}.decay_bias",)),
    *tensors(f"{_STOCK}.o_norm", f"{_MIXER}.output_norm"),
    *tensors(f"{_STOCK}.o_proj", f"{_MIXER}.output"),
    *OUTPUT_NORM,
    *MLP,
)
MAPPING = decoder_mapping(
    "OlmoHybridForCausalLM",
    "olmo_hybrid",
    keys={
        "linear_num_key_heads": ("linear_key_heads", _linear_heads),
        "linear_num_value_heads": ("linear_value_heads", _linear_heads),
        "linear_key_head_dim": ("linear_key_dim", _key_dim),
        "linear_value_head_dim": ("linear_value_dim", lambda content: 2 * content.get("linear_key_head_dim", _key_dim(content))),
        "linear_conv_kernel_dim": ("linear_kernel", 4),
        "linear_allow_neg_eigval": ("negative_eigenvalues", True),
    },
    constants={"attention_bias": False},
    defaults={"vocab_size": 100352, "max_position_embeddings": 65536, "hidden_size": 3840, "num_attention_heads": 30},
    rope=KeyGroup(ROPE.keys, _write_rope, _read_rope),
    nested=(NO_PADDING, KeyGroup(_LAYER_TYPES.keys, _LAYER_TYPES.write, _read_layer_types)),
    # initial values
    ignored_keys=("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor"),
    # the names that the class saves
    renamed=((r"\.attention_layer_norm\.", ".input_layernorm."), (r"\.feedforward_layer_norm\.", ".post_attention_layernorm.")),
    table=decoder_table(
        BlockTensors(_LINEAR_BLOCK, lambda config: [(index, index) for index in range(config.layers) if not config.is_full(index)]),
        BlockTensors(OUTPUT_NORM_BLOCK, lambda config: [(index, index) for index in range(config.layers) if config.is_full(index)]),
    ),
)

FAMILY = Family(config=OlmoHybridConfig, build=_build, initial_std=initial_std, tensor_parallel=WITH_WIDTH_NORMS, huggingface=(MAPPING,))
