"""gpt-oss (OpenAI 2025, https://arxiv.org/abs/2508.10925): attention sinks, mostly local attention, and experts with biases.

Experts of GptOssForCausalLM are stacks of (input, output) matrices, with columns of gate and up in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pipeline.common.knobs import knob
from pipeline.layers.recipes import Constant, Init, scaled_residual
from pipeline.models.config_json_keys import ROPE, as_object, layer_types
from pipeline.models.decoder_mapping import (
    BALANCE_LOSS,
    BOTH,
    INPUT_NORM,
    LAYER,
    OUTPUT_NORM,
    decoder_mapping,
    decoder_table,
    key_value_heads,
    projections,
    sliding_window,
)
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import KeyGroup, StockTensor, Table, refusal, tensors
from pipeline.models.shared_sizes import ExpertsConfig, RotaryDecoderConfig, WindowConfig


@dataclass(frozen=True)
class GptOssConfig(
    RotaryDecoderConfig,
    WindowConfig,
    ExpertsConfig,
    family="gpt_oss",
    layers=36,
    hidden=2880,
    heads=64,
    kv_heads=8,
    head_width=64,
    window=128,
    experts=128,
    top_k=4,
    vocab_size=201088,
    max_positions=131072,
    rope_theta=150000.0,
):
    """Attention with sinks, local ones with a sliding window and, at an interval, global ones; experts with biases and a clamped SwiGLU."""

    attention_bias: bool = knob(True, "biases of the query, key, value and output projections")
    ffn_hidden: int = knob(2880, "intermediate width of each expert", at_least=1)
    swiglu_limit: float = knob(7.0, "bound of the inputs of the experts' gate, and of what it multiplies", above=0)
    swiglu_alpha: float = knob(1.702, "factor in the sigmoid of the experts' gate", above=0)

    @property
    def loss_weights(self) -> dict[str, float]:
        """Training settings of this family and their defaults."""
        return {"balance_loss": 0.001, "z_loss": 0.0}

    @property
    def attention_sinks(self) -> bool:
        """Whether query heads have attention sinks: all have."""
        return True


def _build(config: GptOssConfig) -> Model:
    from pipeline.layers.mlp import ClampedSwiGLU
    from pipeline.layers.stack import MoEStack
    from pipeline.models.decoder import decoder, moe

    swiglu = ClampedSwiGLU(config.swiglu_limit, config.swiglu_alpha)
    return decoder(
        config,
        attention=lambda layer: {"bias": config.attention_bias, "window": config.local_window(layer), "sinks": True},
        # The softmax over the selected logits is the one over all of them, normalized.
        mlp=lambda _: moe(config, config.ffn_hidden, router={"logit_bias": True}, experts={"activation": swiglu, "bias": True}),
        stack=MoEStack,
    )


def initial_std(config: GptOssConfig, name: str) -> Init:
    """Return the standard deviation of weight `name`: GPT-2's recipe, since OpenAI published none; sinks as the stock class has them."""
    return Constant(0.0) if name.endswith("_bias") else scaled_residual(config, name)


_POSITIONS = 131072
#: rope_parameters without the keys.
_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def _read_rope(content: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary fields, with the defaults of the class."""
    given = {"max_position_embeddings": _POSITIONS, **{key: value for key, value in content.items() if value is not None}}
    if not given.get("rope_scaling"):
        given.setdefault("rope_parameters", _YARN)
    return ROPE.read({"rope_theta": 150000.0, **given})


def _read_quantization(content: dict[str, Any]) -> dict[str, Any]:
    """Verify that experts alone are quantized, to MXFP4: the tensors tell which ones."""
    settings = as_object("quantization_config", content.get("quantization_config"))
    if settings.get("quant_method", "mxfp4") != "mxfp4":
        raise refusal("quantization_config", settings, "is not supported; only quant_method=mxfp4 is", "import a copy in bf16")
    return {}


def _table(config: GptOssConfig) -> Table:
    hf, ours = f"{LAYER}.mlp", "blocks.{i}.mlp"
    leaves = BOTH if config.attention_bias else ("weight",)
    experts = f"{ours}.experts"
    gate_up = StockTensor("", (), stacked=True, interleaved="ffn_hidden")
    return decoder_table(
        *INPUT_NORM,
        *projections(leaves, output=leaves),
        StockTensor(f"{LAYER}.self_attn.sinks", ("blocks.{i}.attention.sinks",)),
        *OUTPUT_NORM,
        *tensors(f"{hf}.router", f"{ours}.router"),
        StockTensor(f"{hf}.router.bias", (f"{ours}.router.logit_bias",)),
        replace(gate_up, hf_name=f"{hf}.experts.gate_up_proj", names=(f"{experts}.gate", f"{experts}.up"), transposed=True),
        replace(gate_up, hf_name=f"{hf}.experts.gate_up_proj_bias", names=(f"{experts}.gate_bias", f"{experts}.up_bias")),
        StockTensor(f"{hf}.experts.down_proj", (f"{experts}.down",), stacked=True, transposed=True),
        StockTensor(f"{hf}.experts.down_proj_bias", (f"{experts}.down_bias",), stacked=True),
    )


MAPPING = decoder_mapping(
    "GptOssForCausalLM",
    "gpt_oss",
    keys={
        "attention_bias": ("attention_bias", True),
        "num_local_experts": ("experts", 128),
        "num_experts_per_tok": ("top_k", 4),
        "swiglu_limit": ("swiglu_limit", 7.0),
        "swiglu_alpha": ("swiglu_alpha", 1.702),
    },
    defaults={
        "vocab_size": 201088,
        "max_position_embeddings": _POSITIONS,
        "hidden_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": key_value_heads(8, 64),
        "intermediate_size": 2880,
        "rms_norm_eps": 1e-5,
    },
    rope=replace(ROPE, read=_read_rope),
    head_width=64,
    nested=(
        layer_types(default=2),
        KeyGroup(("quantization_config",), lambda _: {}, _read_quantization),
        sliding_window(default=128, positions=_POSITIONS),
    ),
    training_keys=BALANCE_LOSS,
    ignored_keys=("output_router_logits",),  # a training setting
    mxfp4=True,
    table=_table,
)

FAMILY = Family(config=GptOssConfig, build=_build, initial_std=initial_std, huggingface=(MAPPING,))
