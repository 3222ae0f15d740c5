"""Apertus (Swiss AI Initiative 2025, https://arxiv.org/abs/2509.14233): Llama's attention, and xIELU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pipeline.layers.recipes import Init, scaled_residual
from pipeline.models.config_json_keys import ROPE
from pipeline.models.decoder_mapping import LAYER, NO_PADDING, NORMS, decoder_mapping, decoder_table, projections
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import StockTensor, Table, tensors
from pipeline.models.shared_sizes import RotaryDecoderConfig


@dataclass(frozen=True)
class ApertusConfig(
    RotaryDecoderConfig,
    family="apertus",
    kv_heads=8,
    ffn_hidden=21504,
    vocab_size=131072,
    max_positions=65536,
    rope_theta=12000000.0,
    rope_scaling="llama3",
    rope_factor=8.0,
    rope_original_positions=8192,
):
    """Llama's attention with norms of queries and keys, and a feed-forward layer with xIELU and without a gate."""

    query_key_norm: ClassVar[bool] = True


def _build(config: ApertusConfig) -> Model:
    from pipeline.layers.mlp import XIELU
    from pipeline.models.decoder import decoder, plain_mlp

    return decoder(config, query_key_norm="head", mlp=plain_mlp(config, XIELU))


def initial_std(config: ApertusConfig, name: str) -> Init:
    """GPT-2's recipe, and xIELU's initial curvatures."""
    from pipeline.layers.mlp import XIELU

    _, dot, leaf = name.rpartition("mlp.activation.")
    return XIELU.INITIAL[leaf] if dot else scaled_residual(config, name)


#: The rope parameters of the class if config.json has none.
_DEFAULT_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _read_rope(content: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary fields; without rope_scaling and rope_parameters, the class does not read rope_theta either."""
    if not content.get("rope_scaling") and content.get("rope_parameters") is None:
        return ROPE.read({"rope_parameters": _DEFAULT_ROPE})
    return ROPE.read({"rope_theta": 12000000.0, **content})


def _table(_: ApertusConfig) -> Table:
    from pipeline.layers.mlp import XIELU

    return decoder_table(
        *tensors(f"{LAYER}.attention_layernorm", "blocks.{i}.attention_norm"),
        *projections(),
        *NORMS,
        *tensors(f"{LAYER}.feedforward_layernorm", "blocks.{i}.mlp_norm"),
        *tensors(f"{LAYER}.mlp.up_proj", "blocks.{i}.mlp.up"),
        *tensors(f"{LAYER}.mlp.act_fn", "blocks.{i}.mlp.activation", leaves=("alpha_p", "alpha_n")),
        StockTensor(f"{LAYER}.mlp.act_fn.beta", (), constant=XIELU.BETA),
        StockTensor(f"{LAYER}.mlp.act_fn.eps", (), constant=XIELU.EPS),
        *tensors(f"{LAYER}.mlp.down_proj", "blocks.{i}.mlp.down"),
    )


MAPPING = decoder_mapping(
    "ApertusForCausalLM",
    "apertus",
    activation={"hidden_act": "xielu"},
    constants={"attention_bias": False},
    defaults={"vocab_size": 131072, "max_position_embeddings": 65536, "intermediate_size": 14336, "rms_norm_eps": 1e-5},
    rope=replace(ROPE, read=_read_rope),
    nested=(NO_PADDING,),
    table=_table,
)

FAMILY = Family(config=ApertusConfig, build=_build, initial_std=initial_std, huggingface=(MAPPING,))
