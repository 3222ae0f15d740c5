"""gpt-oss <-> transformers' GptOssForCausalLM. Experts are stacks of (input, output) matrices, with columns of gate and up in turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.models.config_json_keys import ROPE, as_object
from pipeline.models.gpt_oss.config import GptOssConfig
from pipeline.models.huggingface_mapping import KeyGroup, StockTensor, Table, positive, refusal, tensors
from pipeline.models.layer_kinds import layer_types
from pipeline.models.llama import huggingface as llama

_THETA, _POSITIONS = 150000.0, 131072
#: rope_parameters without the keys.
_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}


def _read_rope(content: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary fields, with the defaults of the class."""
    given = {"max_position_embeddings": _POSITIONS, **{key: value for key, value in content.items() if value is not None}}
    if not given.get("rope_scaling"):
        given.setdefault("rope_parameters", _YARN)
    return ROPE.read({"rope_theta": _THETA, **given})


def _read_head_dim(content: dict[str, Any]) -> dict[str, Any]:
    """Return head_width: of 64 dims without the key, hidden / heads if it is null."""
    return llama.HEAD_DIM.read({"hidden_size": 2880, "num_attention_heads": 64, "head_dim": 64, **content})


def _read_window(content: dict[str, Any]) -> dict[str, Any]:
    """Return window, at most the longest sequence: the default of the class may be longer."""
    window = positive("sliding_window", content.get("sliding_window", 128))
    return {"window": min(window, content.get("max_position_embeddings") or _POSITIONS)}


def _read_quantization(content: dict[str, Any]) -> dict[str, Any]:
    """Verify that experts alone are quantized, to MXFP4: the tensors tell which ones."""
    settings = as_object("quantization_config", content.get("quantization_config"))
    if settings.get("quant_method", "mxfp4") != "mxfp4":
        raise refusal("quantization_config", settings, "is not supported; only quant_method=mxfp4 is", "import a copy in bf16")
    return {}


def _table(config: GptOssConfig) -> Table:
    hf, ours = "model.layers.{i}", "blocks.{i}"
    leaves = ("weight", "bias") if config.attention_bias else ("weight",)
    projections = (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output"))
    experts = f"{ours}.mlp.experts"
    gate_up = StockTensor("", (), stacked=True, interleaved="ffn_hidden")
    return (
        *tensors("model.embed_tokens", "embed.tokens"),
        *tensors(f"{hf}.input_layernorm", f"{ours}.attention_norm"),
        *(e for name, our in projections for e in tensors(f"{hf}.self_attn.{name}_proj", f"{ours}.attention.{our}", leaves=leaves)),
        StockTensor(f"{hf}.self_attn.sinks", (f"{ours}.attention.sinks",)),
        *tensors(f"{hf}.post_attention_layernorm", f"{ours}.mlp_norm"),
        *tensors(f"{hf}.mlp.router", f"{ours}.mlp.router"),
        StockTensor(f"{hf}.mlp.router.bias", (f"{ours}.mlp.router.logit_bias",)),
        replace(gate_up, hf_name=f"{hf}.mlp.experts.gate_up_proj", names=(f"{experts}.gate", f"{experts}.up"), transposed=True),
        replace(gate_up, hf_name=f"{hf}.mlp.experts.gate_up_proj_bias", names=(f"{experts}.gate_bias", f"{experts}.up_bias")),
        StockTensor(f"{hf}.mlp.experts.down_proj", (f"{experts}.down",), stacked=True, transposed=True),
        StockTensor(f"{hf}.mlp.experts.down_proj_bias", (f"{experts}.down_bias",), stacked=True),
        *tensors("model.norm", "norm"),
        *tensors("lm_head", "head"),
    )


MAPPING = replace(
    llama.MAPPING,
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    fields={
        **llama.MAPPING.fields,
        "num_local_experts": "experts",
        "num_experts_per_tok": "top_k",
        "swiglu_limit": "swiglu_limit",
        "swiglu_alpha": "swiglu_alpha",
    },
    constants={"hidden_act": "silu", "attention_dropout": 0.0},
    defaults={
        **llama.MAPPING.defaults,
        "vocab_size": 201088,
        "max_position_embeddings": _POSITIONS,
        "hidden_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": llama.kv_heads(8, 64),
        "intermediate_size": 2880,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    },
    nested=(
        replace(ROPE, read=_read_rope),
        replace(llama.HEAD_DIM, read=_read_head_dim),
        layer_types(default=2),
        KeyGroup(("quantization_config",), lambda _: {}, _read_quantization),
        KeyGroup(("sliding_window",), lambda config: {"sliding_window": config.window}, _read_window),
    ),
    # The class averages over the tokens of all layers together, and does not divide by top_k (layers/router.py).
    training_keys={"router_aux_loss_coef": "balance_loss"},
    ignored_keys=("output_router_logits",),  # a training setting
    implied={},
    mxfp4=True,
    table=_table,
)
