"""The tables of other tools' names: which of their tensors holds which of our weights, and how ranks divide it.

One table a naming: Megatron (megatron-core; older names are renamed to these), GPT-NeoX, torchtitan (the names of Meta's Llama), and ours.
Our names are the same in every family, so that a table serves all families that have such weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class Heads(Protocol):
    """What a table needs to know of a configuration."""

    heads: int

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""

    @property
    def head_dim(self) -> int:
        """Width of a head."""


#: (a rank's shard of their tensor, position of our weight in ForeignTensor.ours, configuration) -> the rank's shard of our weight
Part = Callable[[Tensor, int, Any], Tensor]


def whole(shard: Tensor, _: int, __: Heads) -> Tensor:
    """The tensor is our weight."""
    return shard


def halves(shard: Tensor, index: int, _: Heads) -> Tensor:
    """Each rank holds its part of the first weight, then its part of the second."""
    return shard.unflatten(0, (2, -1))[index]


def groups(shard: Tensor, index: int, config: Heads) -> Tensor:
    """Megatron's order: for each key and value head its query heads, the key head, the value head."""
    queries = config.heads // config.kv_heads
    grouped = shard.unflatten(0, (-1, queries + 2, config.head_dim))
    first = (0, queries, queries + 1)[index]
    return grouped[:, first : first + (queries if index == 0 else 1)].flatten(0, 2)


def query_heads(shard: Tensor, index: int, config: Heads) -> Tensor:
    """GPT-NeoX's order: for each query head its rows, then equal shares of the rows of all keys, then of all values."""
    share = config.head_dim * config.kv_heads // config.heads
    first = (0, config.head_dim, config.head_dim + share)[index]
    rows = shard.unflatten(0, (-1, config.head_dim + 2 * share))
    return rows[:, first : first + (share if index else config.head_dim)].flatten(0, 1)


def concatenated(shard: Tensor, index: int, config: Heads) -> Tensor:
    """The order of GPT-NeoX with grouped queries since 2024: each rank's queries, then its keys, then its values."""
    heads = (config.heads, config.kv_heads, config.kv_heads)
    rows, rest = divmod(shard.shape[0], sum(heads))
    if rest:
        raise RuntimeError(f"{shard.shape[0]} rows are not a multiple of {sum(heads)} heads")
    return shard.split([count * rows for count in heads])[index]


def rotary_pairs(shard: Tensor, _: int, config: Heads) -> Tensor:
    """Meta's rotary layout rotates dims (2k, 2k + 1) of a head together; ours, as Hugging Face's, (k, k + head_dim / 2)."""
    return shard.unflatten(0, (-1, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


@dataclass(frozen=True)
class ForeignTensor:
    """One of their tensors.

    Attributes:
        theirs: its name; `{i}` is the index of a block, `{e}` that of an expert.
        ours: our weights that it holds. With `{e}`, each is the stack of all experts, of which the tensor is one.
        dim: dim along which tensor-parallel ranks divide it; None if each has all of it.
        part: returns our weight from theirs.
    """

    theirs: str
    ours: tuple[str, ...]
    dim: int | None = None
    part: Part = whole


@dataclass(frozen=True)
class Naming:
    """How a tool names its tensors.

    Attributes:
        tool: whose names these are, for messages.
        rows: the table; of several rows with the same weight of ours, that applies whose tensor exists.
        ignored: patterns (fnmatch) of tensors that hold no weight.
        renamed: (regular expression, replacement) for names of earlier releases.
    """

    tool: str
    rows: tuple[ForeignTensor, ...]
    ignored: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def current(self, name: str) -> str:
        """Return the name that the table has for a tensor."""
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name


def _same(theirs: str, ours: str, *leaves: str) -> tuple[ForeignTensor, ...]:
    """Rows of weights that all ranks hold."""
    return tuple(ForeignTensor(f"{theirs}.{leaf}", (f"{ours}.{leaf}",)) for leaf in leaves or ("weight",))


def _column(theirs: str, *ours: str, part: Part = whole) -> tuple[ForeignTensor, ...]:
    """Rows of a column-parallel linear layer."""
    return tuple(ForeignTensor(f"{theirs}.{leaf}", tuple(f"{name}.{leaf}" for name in ours), 0, part) for leaf in ("weight", "bias"))


def _row(theirs: str, ours: str) -> tuple[ForeignTensor, ...]:
    """Rows of a row-parallel linear layer, whose bias all ranks hold."""
    return (ForeignTensor(f"{theirs}.weight", (f"{ours}.weight",), 1), ForeignTensor(f"{theirs}.bias", (f"{ours}.bias",)))


_BOTH = ("weight", "bias")
_QKV = ("blocks.{i}.attention.query", "blocks.{i}.attention.key", "blocks.{i}.attention.value")
_GATED = ("blocks.{i}.mlp.gate", "blocks.{i}.mlp.up")
_EXPERTS = ("blocks.{i}.mlp.experts.gate", "blocks.{i}.mlp.experts.up")
#: State of kernels (FP8 scales) and tables of rotary frequencies.
_BUFFERS = ("*_extra_state", "*inv_freq", "*.attention.bias", "*.masked_bias", "freqs_cis", "*.freqs_cis")


def megatron(*, gated: bool) -> Naming:
    """Return the names of megatron-core's GPTModel, written with its own layers or with those of Transformer Engine.

    Args:
        gated: whether linear_fc1 holds a gate (SwiGLU), which comes first.
    """
    layer, attention, mlp = "decoder.layers.{i}", "decoder.layers.{i}.self_attention", "decoder.layers.{i}.mlp"
    experts = f"{mlp}.experts"
    return Naming(
        "Megatron-LM",
        (
            ForeignTensor("embedding.word_embeddings.weight", ("embed.tokens.weight",), 0),
            *_same("embedding.position_embeddings", "embed.positions"),
            *_same(f"{layer}.input_layernorm", "blocks.{i}.attention_norm", *_BOTH),
            *(ForeignTensor(f"{attention}.linear_qkv.layer_norm_{leaf}", (f"blocks.{{i}}.attention_norm.{leaf}",)) for leaf in _BOTH),
            *_column(f"{attention}.linear_qkv", *_QKV, part=groups),
            *_same(f"{attention}.q_layernorm", "blocks.{i}.attention.query_norm"),
            *_same(f"{attention}.k_layernorm", "blocks.{i}.attention.key_norm"),
            *_row(f"{attention}.linear_proj", "blocks.{i}.attention.output"),
            *_same(f"{layer}.pre_mlp_layernorm", "blocks.{i}.mlp_norm", *_BOTH),
            *(ForeignTensor(f"{mlp}.linear_fc1.layer_norm_{leaf}", (f"blocks.{{i}}.mlp_norm.{leaf}",)) for leaf in _BOTH),
            *(_column(f"{mlp}.linear_fc1", *_GATED, part=halves) if gated else _column(f"{mlp}.linear_fc1", "blocks.{i}.mlp.up")),
            *_row(f"{mlp}.linear_fc2", "blocks.{i}.mlp.down"),
            *_same(f"{mlp}.router", "blocks.{i}.mlp.router"),
            ForeignTensor(f"{experts}.local_experts.{{e}}.linear_fc1.weight", _EXPERTS, 0, halves),
            ForeignTensor(f"{experts}.local_experts.{{e}}.linear_fc2.weight", ("blocks.{i}.mlp.experts.down",), 1),
            *_same("decoder.final_layernorm", "norm", *_BOTH),
            ForeignTensor("output_layer.weight", ("head.weight",), 0),
        ),
        ignored=_BUFFERS,
        renamed=(
            (r"^language_model\.", ""),
            (r"^word_embeddings_for_head\.", "output_layer."),
            (r"^(encoder|transformer)\.", "decoder."),
            (r"^(decoder\.layers\.\d+\.)attention\.", r"\1self_attention."),
            (r"\.query_key_value\.", ".linear_qkv."),
            (r"\.self_attention\.dense\.", ".self_attention.linear_proj."),
            (r"\.dense_h_to_4h\.", ".linear_fc1."),
            (r"\.dense_4h_to_h\.", ".linear_fc2."),
            (r"\.input_norm\.", ".input_layernorm."),
            (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
            (r"^decoder\.final_norm\.", "decoder.final_layernorm."),
            (r"\.experts\.linear_fc([12])\.weight(\d+)$", r".experts.local_experts.\2.linear_fc\1.weight"),  # grouped GEMM
        ),
    )


def neox(*, gated: bool, part: Part) -> Naming:
    """Return the names of GPT-NeoX. RMSNorm calls its weight `scale`, which is renamed.

    Args:
        gated: whether linear1 holds a gate, which comes second.
        part: the order of queries, keys and values.
    """
    mlp = "layers.{i}.mlp"
    return Naming(
        "GPT-NeoX",
        (
            ForeignTensor("word_embeddings.weight", ("embed.tokens.weight",), 0),
            *_same("position_embeddings", "embed.positions"),
            *_same("layers.{i}.input_layernorm", "blocks.{i}.attention_norm", *_BOTH),
            *_column("layers.{i}.attention.query_key_value", *_QKV, part=part),
            *_row("layers.{i}.attention.dense", "blocks.{i}.attention.output"),
            *_same("layers.{i}.post_attention_layernorm", "blocks.{i}.mlp_norm", *_BOTH),
            *(_column(f"{mlp}.linear1", *_GATED[::-1], part=halves) if gated else _column(f"{mlp}.linear1", "blocks.{i}.mlp.up")),
            *_row(f"{mlp}.linear2", "blocks.{i}.mlp.down"),
            *_column(f"{mlp}.w1", "blocks.{i}.mlp.gate"),
            *_column(f"{mlp}.w3", "blocks.{i}.mlp.up"),
            *_row(f"{mlp}.w2", "blocks.{i}.mlp.down"),
            *_same("norm", "norm", *_BOTH),
            ForeignTensor("final_linear.weight", ("head.weight",), 0),
        ),
        ignored=_BUFFERS,
        renamed=(
            (r"\.dense_h_to_4h\.", ".linear1."),
            (r"\.dense_4h_to_h\.", ".linear2."),
            (r"((?:^|_layer)norm)\.scale$", r"\1.weight"),
        ),
    )


TORCHTITAN = Naming(
    "torchtitan",
    (
        *_same("tok_embeddings", "embed.tokens"),
        *_same("layers.{i}.attention_norm", "blocks.{i}.attention_norm"),
        *_column("layers.{i}.attention.wq", "blocks.{i}.attention.query", part=rotary_pairs),
        *_column("layers.{i}.attention.wk", "blocks.{i}.attention.key", part=rotary_pairs),
        *_column("layers.{i}.attention.wv", "blocks.{i}.attention.value"),
        *_row("layers.{i}.attention.wo", "blocks.{i}.attention.output"),
        *_same("layers.{i}.ffn_norm", "blocks.{i}.mlp_norm"),
        *_column("layers.{i}.feed_forward.w1", "blocks.{i}.mlp.gate"),
        *_column("layers.{i}.feed_forward.w3", "blocks.{i}.mlp.up"),
        *_row("layers.{i}.feed_forward.w2", "blocks.{i}.mlp.down"),
        *_same("norm", "norm"),
        *_same("output", "head"),
    ),
    ignored=_BUFFERS,
)


def ours(names: list[str]) -> Naming:
    """Return our own names, for checkpoints of other tools of a model of this repository."""
    return Naming("this repository", tuple(ForeignTensor(name, (name,)) for name in names))
