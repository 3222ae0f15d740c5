"""GPT-NeoX-20B (Black et al. 2022, https://arxiv.org/abs/2204.06745) and Pythia (Biderman et al. 2023, https://arxiv.org/abs/2304.01373).

GPTNeoXForCausalLM of transformers has queries, keys and values in one tensor, head by head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pipeline.common.knobs import knob
from pipeline.layers.recipes import Init, scaled_residual
from pipeline.models import rope
from pipeline.models.config_json_keys import partial_rope
from pipeline.models.decoder_mapping import BOTH
from pipeline.models.family import Family, Model
from pipeline.models.huggingface_mapping import HuggingFaceMapping, KeyGroup, Table, refusal, tensors
from pipeline.models.shared_sizes import LayerNormConfig, PartialRotaryConfig


@dataclass(frozen=True)
class GPTNeoXConfig(
    PartialRotaryConfig,
    LayerNormConfig,
    rope.RopeConfig,
    family="gpt_neox",
    partial_rotary_factor=0.25,
    layers=24,
    hidden=2048,
    heads=16,
    vocab_size=50304,
    max_positions=2048,
    tie_embeddings=False,
):
    """Attention and feed-forward side by side, rotary positions of a part of the dims of a head, LayerNorm, GELU, untied embeddings."""

    ffn_hidden: int = knob(8192, "intermediate width of the feed-forward", at_least=1)
    parallel_residual: bool = knob(True, "the feed-forward reads the input of the block, as attention does; false for GPT-2's order")
    attention_bias: bool = knob(True, "biases of the attention layers")
    activation: str = knob("gelu", "activation of the feed-forward; gelu_tanh in GPT-NeoX-20B", choices=("gelu", "gelu_tanh"))
    init_method: str = knob(
        "small_init",
        "initial weights: small_init for Pythia's, with standard deviations that depend on the sizes; normal for GPT-2's with init_std",
        choices=("small_init", "normal"),
    )
    init_std: float = knob(0.02, "standard deviation of initial weights with init_method=normal", above=0)


def _build(config: GPTNeoXConfig) -> Model:
    from torch import nn

    from pipeline.models.decoder import decoder, plain_mlp

    return decoder(
        config,
        norm=nn.LayerNorm,
        attention=lambda _: {"bias": config.attention_bias},
        mlp=plain_mlp(config, config.activation, bias=True),
        block=lambda _: {"parallel_residual": config.parallel_residual},
    )


def initial_std(config: GPTNeoXConfig, name: str) -> Init:
    """EleutherAI's recipe (github.com/EleutherAI/gpt-neox, megatron/model/init_functions.py): small_init, and wang_init for outputs.

    sqrt(2 / (5 hidden)) (Nguyen & Salazar 2019, https://arxiv.org/abs/1910.05895), and 2 / (layers sqrt(hidden)) for the layers whose
    output is added to the residual stream.
    """
    if "norm" in name or name.endswith(".bias") or config.init_method == "normal":
        return scaled_residual(config, name)
    if name.endswith(("attention.output.weight", "mlp.down.weight")):
        return 2 / (config.layers * math.sqrt(config.hidden))
    return math.sqrt(2 / (5 * config.hidden))


#: hidden_act -> our name; the first one with it is exported. The last three are the same function.
_ACTIVATIONS = {"gelu": "gelu", "gelu_fast": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def _write_activation(config: GPTNeoXConfig) -> dict[str, Any]:
    return {"hidden_act": next(key for key, name in _ACTIVATIONS.items() if name == config.activation)}


def _read_activation(content: dict[str, Any]) -> dict[str, Any]:
    given = content.get("hidden_act", "gelu")
    if not isinstance(given, str) or given not in _ACTIVATIONS:
        raise refusal("hidden_act", given, f"is not supported by this family; supported are {', '.join(_ACTIVATIONS)}")
    return {"activation": _ACTIVATIONS[given]}


def _table(config: GPTNeoXConfig) -> Table:
    block, ours = "gpt_neox.layers.{i}", "blocks.{i}"
    leaves = BOTH if config.attention_bias else ("weight",)
    queries = (f"{ours}.attention.{name}" for name in ("query", "key", "value"))
    return (
        *tensors("gpt_neox.embed_in", "embed.tokens"),
        *tensors(f"{block}.input_layernorm", f"{ours}.attention_norm", leaves=BOTH),
        *tensors(f"{block}.post_attention_layernorm", f"{ours}.mlp_norm", leaves=BOTH),
        *tensors(f"{block}.attention.query_key_value", *queries, leaves=leaves, interleaved="heads"),
        *tensors(f"{block}.attention.dense", f"{ours}.attention.output", leaves=leaves),
        *tensors(f"{block}.mlp.dense_h_to_4h", f"{ours}.mlp.up", leaves=BOTH),
        *tensors(f"{block}.mlp.dense_4h_to_h", f"{ours}.mlp.down", leaves=BOTH),
        *tensors("gpt_neox.final_layer_norm", "norm", leaves=BOTH),
        *tensors("embed_out", "head"),
    )


MAPPING = HuggingFaceMapping(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    keys={
        "vocab_size": ("vocab_size", 50432),
        "max_position_embeddings": ("max_positions", 2048),
        "hidden_size": ("hidden", 6144),
        "num_hidden_layers": ("layers", 44),
        "num_attention_heads": ("heads", 64),
        "intermediate_size": ("ffn_hidden", 24576),
        "use_parallel_residual": ("parallel_residual", True),
        "attention_bias": ("attention_bias", True),
        "layer_norm_eps": ("norm_eps", 1e-5),
        "initializer_range": ("init_std", 0.02),
        "tie_word_embeddings": ("tie_embeddings", False),
    },
    constants={"attention_dropout": 0.0, "hidden_dropout": 0.0},
    nested=(
        partial_rope(share=0.25, theta_key="rotary_emb_base", share_key="rotary_pct"),
        KeyGroup(("hidden_act",), _write_activation, _read_activation),
    ),
    table=_table,
    renamed=((r"^lm_head\.", "embed_out."),),  # the name in the code of transformers 5, which writes files with the other one
    ignored_weights=(
        *("gpt_neox.layers.*.attention.bias", "gpt_neox.layers.*.attention.masked_bias"),
        "gpt_neox.layers.*.attention.rotary_emb.inv_freq",
    ),
)

FAMILY = Family(config=GPTNeoXConfig, build=_build, initial_std=initial_std, huggingface=(MAPPING,))
