"""ModernBERT <-> transformers' ModernBertForMaskedLM."""

from __future__ import annotations

from typing import Any

from pipeline.models.config_json_keys import as_object, interval_of, number
from pipeline.models.huggingface_mapping import BlockTensors, HuggingFaceMapping, KeyGroup, Table, positive, refusal, tensors
from pipeline.models.layer_kinds import GLOBAL, LOCAL
from pipeline.models.llama.huggingface import NO_PADDING
from pipeline.models.modernbert.config import ModernBertConfig

#: Kind of layer -> our field with the base of its rotary positions, the key of earlier releases, and the default.
_BASES = {GLOBAL: ("rope_theta", "global_rope_theta", 160000.0), LOCAL: ("rope_local_theta", "local_rope_theta", 10000.0)}


def _write_rope(config: ModernBertConfig) -> dict[str, Any]:
    """Return the current key and those of transformers 4."""
    bases = {kind: getattr(config, field) for kind, (field, _, _) in _BASES.items()}
    parameters = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    return {"rope_parameters": parameters, **{key: bases[kind] for kind, (_, key, _) in _BASES.items()}}


def _read_rope(content: dict[str, Any]) -> dict[str, Any]:
    """Return the bases; scaled positions are refused."""
    if scaling := content.get("rope_scaling"):
        raise refusal("rope_scaling", scaling, "is not supported by this family; only null is supported")
    parameters = as_object("rope_parameters", content.get("rope_parameters"))
    for key in parameters.keys() - _BASES.keys():
        raise refusal(f"rope_parameters.{key}", parameters[key], f"must be {LOCAL} or {GLOBAL}, the kind of layer", "fix config.json")
    found: dict[str, Any] = {}
    for kind, (field, legacy, default) in _BASES.items():
        of_kind = {name: value for name, value in as_object(f"rope_parameters.{kind}", parameters.get(kind)).items() if value is not None}
        base = of_kind.pop("rope_theta", default if content.get(legacy) is None else content[legacy])
        if (rope_type := of_kind.pop("rope_type", "default")) != "default":
            raise refusal(f"rope_parameters.{kind}.rope_type", rope_type, "is not supported by this family; only default is")
        if of_kind.pop("partial_rotary_factor", 1) != 1:
            raise refusal(f"rope_parameters.{kind}", parameters[kind], "has a partial_rotary_factor other than 1, which is not supported")
        for name, value in of_kind.items():
            raise refusal(f"rope_parameters.{kind}.{name}", value, "is not a key of rope_type=default")
        found[field] = number(f"rope_parameters.{kind}.rope_theta", base)
    return found


def _write_kinds(config: ModernBertConfig) -> dict[str, Any]:
    """Return the interval of the global layers, which transformers 4 reads, and the kind of each layer."""
    kinds = [GLOBAL if config.is_global(layer) else LOCAL for layer in range(config.layers)]
    return {"global_attn_every_n_layers": config.global_attn_every_n_layers, "layer_types": kinds}


def _read_kinds(content: dict[str, Any]) -> dict[str, Any]:
    """Return the interval; the list takes precedence, as in the class."""
    interval, kinds = content.get("global_attn_every_n_layers"), content.get("layer_types")
    interval = 3 if interval is None else positive("global_attn_every_n_layers", interval)
    if kinds is None:
        return {"global_attn_every_n_layers": interval}
    if not (isinstance(kinds, list) and all(kind in (LOCAL, GLOBAL) for kind in kinds)):
        raise refusal("layer_types", kinds, f"must be a list of {LOCAL} and {GLOBAL}")
    if len(kinds) != (layers := content.get("num_hidden_layers", 22)):
        raise refusal("layer_types", kinds, f"has {len(kinds)} entries for num_hidden_layers={layers}", "correct config.json")
    if kinds and kinds[0] != GLOBAL:
        raise refusal("layer_types", kinds, f"does not begin with {GLOBAL}, which this family requires")
    return {"global_attn_every_n_layers": interval_of("layer_types", kinds[1:], GLOBAL, interval)}


_HF, _BLOCK = "model.layers.{i}", "blocks.{i}"
#: The first block has no norm before its attention: the norm of the embedding is there.
_ATTENTION_NORM = BlockTensors(
    tensors(f"{_HF}.attn_norm", f"{_BLOCK}.attention_norm"), lambda config: [(index, index) for index in range(1, config.layers)]
)
_TABLE: Table = (
    *tensors("model.embeddings.tok_embeddings", "embed.tokens"),
    *tensors("model.embeddings.norm", "embed.norm"),
    _ATTENTION_NORM,
    *tensors(f"{_HF}.attn.Wqkv", *(f"{_BLOCK}.attention.{name}" for name in ("query", "key", "value"))),
    *tensors(f"{_HF}.attn.Wo", f"{_BLOCK}.attention.output"),
    *tensors(f"{_HF}.mlp_norm", f"{_BLOCK}.mlp_norm"),
    # The first half of the outputs is activated, and multiplied by the second.
    *tensors(f"{_HF}.mlp.Wi", f"{_BLOCK}.mlp.gate", f"{_BLOCK}.mlp.up"),
    *tensors(f"{_HF}.mlp.Wo", f"{_BLOCK}.mlp.down"),
    *tensors("model.final_norm", "norm"),
    *tensors("head.dense", "head.dense"),
    *tensors("head.norm", "head.norm"),
    *tensors("decoder", "head.output", leaves=("weight", "bias")),
)

MAPPING = HuggingFaceMapping(
    architecture="ModernBertForMaskedLM",
    model_type="modernbert",
    fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "intermediate_size": "ffn_hidden",
        "max_position_embeddings": "max_positions",
        "local_attention": "local_attention",
        "norm_eps": "norm_eps",
        "initializer_range": "init_std",
        "tie_word_embeddings": "tie_embeddings",
    },
    constants={
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "attention_bias": False,
        "mlp_bias": False,
        "norm_bias": False,
        "classifier_bias": False,
        "decoder_bias": True,
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
    },
    defaults={
        "vocab_size": 50368,
        "hidden_size": 768,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "intermediate_size": 1152,
        "max_position_embeddings": 8192,
        "local_attention": 128,
        "norm_eps": 1e-5,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
    },
    nested=(
        KeyGroup(("rope_parameters", "rope_scaling", "global_rope_theta", "local_rope_theta"), _write_rope, _read_rope),
        KeyGroup(("global_attn_every_n_layers", "layer_types"), _write_kinds, _read_kinds),
        NO_PADDING,
    ),
    # of classification, of initial values, of a kernel, and of the loss of the class
    ignored_keys=(
        *("classifier_pooling", "initializer_cutoff_factor", "deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index"),
    ),
    table=_TABLE,
)
