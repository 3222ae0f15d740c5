"""Tables of config.json keys and of tensors of decoders whose Hugging Face classes have Llama's names; a family states what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from pipeline.models.config_json_keys import ROPE
from pipeline.models.huggingface_mapping import (
    BlockTensors,
    HuggingFaceMapping,
    KeyGroup,
    StockTensor,
    Table,
    gated_experts,
    gated_mlp,
    positive,
    refusal,
    tensors,
)

LAYER = "model.layers.{i}"
BOTH = ("weight", "bias")


def projections(
    leaves: Sequence[str] = ("weight",), *, output: Sequence[str] = ("weight",), block: str = "blocks.{i}"
) -> tuple[StockTensor, ...]:
    """Return the tensors of the query, key, value and output projections: `leaves` of the first three, `output` of the last one."""
    return (
        *tensors(f"{LAYER}.self_attn.q_proj", f"{block}.attention.query", leaves=leaves),
        *tensors(f"{LAYER}.self_attn.k_proj", f"{block}.attention.key", leaves=leaves),
        *tensors(f"{LAYER}.self_attn.v_proj", f"{block}.attention.value", leaves=leaves),
        *tensors(f"{LAYER}.self_attn.o_proj", f"{block}.attention.output", leaves=output),
    )


def decoder_table(*blocks: StockTensor | BlockTensors) -> Table:
    """Return the tensors of a decoder: embedding, those of the blocks, final norm and head."""
    return (*tensors("model.embed_tokens", "embed.tokens"), *blocks, *tensors("model.norm", "norm"), *tensors("lm_head", "head"))


INPUT_NORM = tensors(f"{LAYER}.input_layernorm", "blocks.{i}.attention_norm")
OUTPUT_NORM = tensors(f"{LAYER}.post_attention_layernorm", "blocks.{i}.mlp_norm")
#: the norms of queries and keys
NORMS = (
    *tensors(f"{LAYER}.self_attn.q_norm", "blocks.{i}.attention.query_norm"),
    *tensors(f"{LAYER}.self_attn.k_norm", "blocks.{i}.attention.key_norm"),
)
#: a block of Llama without its feed-forward
ATTENTION = (*INPUT_NORM, *projections(), *OUTPUT_NORM)
MLP = gated_mlp(f"{LAYER}.mlp", "blocks.{i}.mlp")
#: experts whose router is `gate`
EXPERTS = (*tensors(f"{LAYER}.mlp.gate", "blocks.{i}.mlp.router"), *gated_experts(f"{LAYER}.mlp", "blocks.{i}.mlp"))
TABLE = decoder_table(*ATTENTION, *MLP)
#: a block with norms of the outputs of the layers instead of their inputs, and of queries and keys (OLMo 2)
OUTPUT_NORM_BLOCK = (
    *projections(),
    *NORMS,
    *tensors(f"{LAYER}.post_attention_layernorm", "blocks.{i}.post_attention_norm"),
    *MLP,
    *tensors(f"{LAYER}.post_feedforward_layernorm", "blocks.{i}.post_mlp_norm"),
)
OUTPUT_NORM_TABLE = decoder_table(*OUTPUT_NORM_BLOCK)


def key_value_heads(missing: int, heads: int) -> Callable[[dict[str, Any]], int]:
    """Return the default of num_key_value_heads: `missing` without the key, the number of heads (by default `heads`) if it is null."""
    return lambda content: content.get("num_attention_heads", heads) if "num_key_value_heads" in content else missing


def _head_dim(hidden: int, heads: int, missing: int | None) -> KeyGroup:
    """Return the key of the width of a head, which is hidden / heads if it is null.

    Args:
        hidden: default of hidden_size.
        heads: default of num_attention_heads.
        missing: the width without the key; None for hidden / heads.
    """

    def read(content: dict[str, Any]) -> dict[str, Any]:
        width, derived = content.get("head_dim", missing), content.get("hidden_size", hidden) / content.get("num_attention_heads", heads)
        return {"head_width": None if width in (None, derived) else positive("head_dim", width)}

    return KeyGroup(("head_dim",), lambda config: {"head_dim": config.head_dim}, read)


def sliding_window(*, default: int, positions: int) -> KeyGroup:
    """Return the key of the window of local layers, at most the longest sequence: the default of a class may be longer."""

    def read(content: dict[str, Any]) -> dict[str, Any]:
        window = positive("sliding_window", content.get("sliding_window", default))
        return {"window": min(window, content.get("max_position_embeddings") or positions)}

    return KeyGroup(("sliding_window",), lambda config: {"sliding_window": config.window}, read)


def _read_layer_types(content: dict[str, Any]) -> dict[str, Any]:
    """Verify that every layer has full attention."""
    kinds = content.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or {*map(str, kinds)} != {"full_attention"}):
        raise refusal("layer_types", kinds, "is not supported by this family; only full_attention is supported")
    return {}


FULL_ATTENTION = KeyGroup(("layer_types",), lambda _: {}, _read_layer_types)
#: For classes whose default padding token may be a text token, or outside the vocabulary; padding does not affect the logits.
NO_PADDING = KeyGroup(keys=("pad_token_id",), write=lambda config: {"pad_token_id": None}, read=lambda content: {})  # noqa: ARG005

#: key of config.json -> our field, and the default of LlamaForCausalLM
KEYS: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 32000),
    "max_position_embeddings": ("max_positions", 2048),
    "hidden_size": ("hidden", 4096),
    "num_hidden_layers": ("layers", 32),
    "num_attention_heads": ("heads", 32),
    "num_key_value_heads": ("kv_heads", None),  # as many as query heads
    "intermediate_size": ("ffn_hidden", 11008),
    "rms_norm_eps": ("norm_eps", 1e-6),
    "initializer_range": ("init_std", 0.02),
    "tie_word_embeddings": ("tie_embeddings", False),
}
#: the keys of a MoE layer in most classes
EXPERT_KEYS = {"num_experts": ("experts", 64), "num_experts_per_tok": ("top_k", 8), "norm_topk_prob": ("norm_topk_prob", False)}
#: The classes average the balance loss over the tokens of all layers together, and do not divide by top_k (layers/router.py).
BALANCE_LOSS = {"router_aux_loss_coef": "balance_loss"}


def decoder_mapping(
    architecture: str,
    model_type: str,
    *,
    keys: dict[str, tuple[str, Any]] | None = None,
    without: Sequence[str] = (),
    activation: dict[str, str] | None = None,
    constants: dict[str, Any] | None = None,
    defaults: dict[str, Any] | None = None,
    rope: KeyGroup = ROPE,
    head_width: int | Literal["derived"] | None = "derived",
    nested: Sequence[KeyGroup] = (),
    table: Table | Callable[[Any], Table] = TABLE,
    **more: Any,
) -> HuggingFaceMapping:
    """Return the mapping of a class with Llama's names.

    Args:
        architecture: name of the class.
        model_type: model_type of its config.json.
        keys: further keys, as in HuggingFaceMapping.
        without: Llama's keys that the class lacks.
        activation: the key of the activation and its value, that of SwiGLU when None.
        constants: further keys with one supported value.
        defaults: the defaults of the class that differ from those of KEYS and `keys`.
        rope: the keys of the rotary positions.
        head_width: the width of a head if config.json has no head_dim, "derived" for hidden / heads; None for a class without the key.
        nested: further keys that need functions to translate.
        table: as in HuggingFaceMapping.
        more: as in HuggingFaceMapping.
    """
    every = {key: value for key, value in KEYS.items() if key not in without} | (keys or {})
    every |= {key: (every[key][0], default) for key, default in (defaults or {}).items()}
    heads = every["num_attention_heads"][1]
    widths = [] if head_width is None else [_head_dim(every["hidden_size"][1], heads, None if head_width == "derived" else head_width)]
    if every["num_key_value_heads"][1] is None:
        every["num_key_value_heads"] = ("kv_heads", lambda content: content.get("num_attention_heads", heads))
    return HuggingFaceMapping(
        architecture=architecture,
        model_type=model_type,
        keys=every,
        constants={**(activation or {"hidden_act": "silu"}), "attention_dropout": 0.0, **(constants or {})},
        nested=(rope, *widths, *nested),
        table=table,
        **more,
    )
