"""ModernBERT (Warner et al. 2024, https://arxiv.org/abs/2412.13663): an encoder with Llama's positions and Gemma's mix of windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.common.errors import Violation
from pipeline.common.knobs import knob
from pipeline.layers.recipes import Init, scaled_residual
from pipeline.models.config_json_keys import GLOBAL, LOCAL, as_object, interval_of, number
from pipeline.models.decoder_mapping import NO_PADDING
from pipeline.models.family import Family, Model, tied_output
from pipeline.models.huggingface_mapping import BlockTensors, HuggingFaceMapping, KeyGroup, Table, positive, refusal, tensors
from pipeline.models.shared_sizes import LayerNormConfig, rotary_heads_violations


@dataclass(frozen=True)
class ModernBertConfig(LayerNormConfig, family="modernbert", vocab_size=50368, max_positions=8192):
    """Pre-norm encoder without biases: rotary positions, GeGLU; at an interval global layers, the others with a window on both sides."""

    layers: int = knob(22, "encoder blocks", at_least=1, at_most=2000)
    ffn_hidden: int = knob(1152, "intermediate width of the feed-forward", at_least=1)
    global_attn_every_n_layers: int = knob(3, "the first of each of so many layers attends globally, the others locally", at_least=1)
    local_attention: int = knob(
        128, "window of the local layers: a token attends to half as many tokens on each side, and to itself", unit="tokens", at_least=2
    )
    rope_theta: float = knob(160000.0, "base of the rotary frequencies of the global layers", above=1)
    rope_local_theta: float = knob(10000.0, "base of the rotary frequencies of the local layers", above=1)

    @property
    def objective(self) -> str:
        """Training objective: masked-token prediction."""
        return "masked"

    @property
    def next_sentence(self) -> bool:
        """There is no next-sentence prediction."""
        return False

    @property
    def padding_token(self) -> int | None:
        """The Hugging Face class computes positions without regard to the padding token."""
        return None

    def is_global(self, layer: int) -> bool:
        """Whether a layer, counted from 0, attends to all tokens."""
        return layer % self.global_attn_every_n_layers == 0

    def violations(self) -> list[Violation]:
        """See Sizes."""
        return list(rotary_heads_violations(self.hidden, self.heads, self.heads))


def _build(config: ModernBertConfig) -> Model:
    from functools import partial

    from torch import nn

    from pipeline.layers.masked_head import MaskedHead
    from pipeline.layers.mlp import GatedMLP
    from pipeline.models.decoder import decoder

    norm = partial(nn.LayerNorm, bias=False)

    def attention(layer: int) -> dict[str, Any]:
        if config.is_global(layer):
            return {}
        return {"window": config.local_attention // 2 + 1, "rope": "local"}  # Mask counts the query's own position

    return decoder(
        config,
        norm=norm,
        attention=attention,
        mlp=lambda _: GatedMLP(config.hidden, config.ffn_hidden, bias=False, activation="gelu"),
        block=lambda layer: {} if layer else {"attention_norm": None},  # the norm of the embedding is there
        embed={"norm": norm(config.hidden, eps=config.norm_eps)},
        head=MaskedHead(config.vocab_size, config.hidden, config.norm_eps, sentence=False, bias=False),
        causal=False,
    )


def initial_std(config: ModernBertConfig, name: str) -> Init:
    """The recipe of the stock class (_init_weights, modeling_modernbert.py in transformers), here not truncated."""
    if name in ("head.dense.weight", "head.output.weight"):
        return scaled_residual(config, "attention.output.weight")
    return scaled_residual(config, name)


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
    for key in sorted(parameters.keys() - _BASES.keys()):
        raise refusal(f"rope_parameters.{key}", parameters[key], f"must be {LOCAL} or {GLOBAL}, the kind of layer", "fix config.json")
    bases: dict[str, Any] = {}
    for kind, (field, legacy, default) in _BASES.items():
        of_kind = {name: value for name, value in as_object(f"rope_parameters.{kind}", parameters.get(kind)).items() if value is not None}
        base = of_kind.pop("rope_theta", default if content.get(legacy) is None else content[legacy])
        if (rope_type := of_kind.pop("rope_type", "default")) != "default":
            raise refusal(f"rope_parameters.{kind}.rope_type", rope_type, "is not supported by this family; only default is")
        if of_kind.pop("partial_rotary_factor", 1) != 1:
            raise refusal(f"rope_parameters.{kind}", parameters[kind], "has a partial_rotary_factor other than 1, which is not supported")
        for name, value in of_kind.items():
            raise refusal(f"rope_parameters.{kind}.{name}", value, "is not a key of rope_type=default")
        bases[field] = number(f"rope_parameters.{kind}.rope_theta", base)
    return bases


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
_TABLE: Table = (
    *tensors("model.embeddings.tok_embeddings", "embed.tokens"),
    *tensors("model.embeddings.norm", "embed.norm"),
    # The first block has no norm before its attention.
    BlockTensors(
        tensors(f"{_HF}.attn_norm", f"{_BLOCK}.attention_norm"), lambda config: [(index, index) for index in range(1, config.layers)]
    ),
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
    keys={
        "vocab_size": ("vocab_size", 50368),
        "hidden_size": ("hidden", 768),
        "num_hidden_layers": ("layers", 22),
        "num_attention_heads": ("heads", 12),
        "intermediate_size": ("ffn_hidden", 1152),
        "max_position_embeddings": ("max_positions", 8192),
        "local_attention": ("local_attention", 128),
        "norm_eps": ("norm_eps", 1e-5),
        "initializer_range": ("init_std", 0.02),
        "tie_word_embeddings": ("tie_embeddings", True),
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

FAMILY = Family(config=ModernBertConfig, build=_build, initial_std=initial_std, huggingface=(MAPPING,), tied_weights=tied_output)
