"""A model in GGUF: the names and the order of its tensors, and its settings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.models import registry
from pipeline.models.config import ModelConfig
from pipeline.models.shared_sizes import LayerNormConfig, rotated_dims
from pipeline.models.stock_tensors import Shape, StockTensor
from pipeline.quantization.gguf_architectures import Architecture, Change, architecture_of
from pipeline.quantization.gguf_tokens import Tokens

if TYPE_CHECKING:
    from gguf import GGUFWriter

#: Kinds of tensors that llama.cpp expects in fp32 in files of any type.
_FP32 = re.compile(r"(position_embd|ffn_gate_inp|ssm_conv1d(_[qkv])?|ssm_a|ssm_d|ssm_norm)(\.weight)?")


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a file.

    Attributes:
        name: in GGUF.
        tensor: the weights that it contains; none for a constant.
        order: sizes of four dims into which a dim of the last of these weights is divided, and of which the second and third are
            transposed; None for none.
        dim: that dim.
        change: how it is stored; None for as it is.
    """

    name: str
    tensor: StockTensor
    order: tuple[int, ...] | None = None
    dim: int = 0
    change: Change | None = None

    @property
    def kind(self) -> str:
        """Its name without the number of a block."""
        return re.sub(r"^blk\.\d+\.", "", self.name)

    @property
    def is_plain(self) -> bool:
        """Whether it is fp32 in files of any type, as llama.cpp expects; vectors are, too."""
        return _FP32.fullmatch(self.kind) is not None

    def shape(self, shapes: list[Shape]) -> Shape:
        """Return the shape of the tensor, from those of our weights."""
        shape = self.tensor.shape(shapes)
        return shape if self.change is None else tuple(self.change[0](torch.empty(shape, device="meta")).shape)

    def to_file(self, weights: list[Tensor]) -> Tensor:
        """Return the tensor, from our weights."""
        value = self.tensor.to_hf([*weights[:-1], *(self._reordered(weight, self.order) for weight in weights[-1:])])
        return value if self.change is None else self.change[0](value)

    def from_file(self, value: Tensor, shapes: list[Shape]) -> list[Tensor]:
        """Return our weights, the inverse of to_file, with zeros for what this tensor lacks of a weight that several contain."""
        value = value if self.change is None else self.change[1](value)
        *others, last = self.tensor.from_hf(value.reshape(self.tensor.shape(shapes)), shapes)
        inverse = None if self.order is None else tuple(self.order[index] for index in (0, 2, 1, 3))
        return [*others, self._reordered(last, inverse)]

    def _reordered(self, weight: Tensor, order: tuple[int, ...] | None) -> Tensor:
        if order is None:
            return weight
        return weight.unflatten(self.dim, order).transpose(self.dim + 1, self.dim + 2).flatten(self.dim, self.dim + 3)


_SHIFTED: Change = (lambda value: value + 1, lambda value: value - 1)
#: End of a name in GGUF -> how the tensor is stored. The logarithm of a decay rate is stored as the negative rate.
_CHANGES: dict[str, Change] = {
    "ssm_a": (lambda value: -value.exp(), lambda value: (-value).log()),
    "ssm_conv1d.weight": (lambda value: value.flatten(1), lambda value: value),
    "ffn_gate_inp_shexp.weight": (lambda value: value.flatten(), lambda value: value),
}
#: End of a Hugging Face name -> tensors of a block in GGUF, and how many of our weights each contains; where gguf does not name them so
_BLOCK_TENSORS = {
    "dt_bias": {"ssm_dt.bias": 1},
    "layer_scalar": {"layer_output_scale.weight": 1},
    "kv_b_proj.weight": {"attn_k_b.weight": 1, "attn_v_b.weight": 1},  # a part of the same weight each
    "gate.e_score_correction_bias": {"exp_probs_b.bias": 1},
    "mixer.experts.up_proj.weight": {"ffn_up_exps.weight": 1},
    "mixer.experts.down_proj.weight": {"ffn_down_exps.weight": 1},
    "shared_mlp.input_linear.weight": {"ffn_gate_shexp.weight": 1, "ffn_up_shexp.weight": 1},
    "block_sparse_moe.input_linear.weight": {"ffn_gate_exps.weight": 1, "ffn_up_exps.weight": 1},
    "linear_attn.in_proj_qkvz.weight": {"attn_qkv.weight": 3, "attn_gate.weight": 1},
}


def rows(config: ModelConfig) -> Iterator[GGUFTensor]:
    """Yield the tensors of a file. A tied head is not stored; the experts of a layer are stacked, as ours are."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = architecture_of(config)
    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(numbers[architecture.name], config.layers)
    for entry in registry.stock_tensors(config)[0]:
        if entry.expert not in (None, 0):
            continue
        known = entry.hf_name.replace(".experts.0.", ".experts.")
        parts = next((parts for end, parts in _BLOCK_TENSORS.items() if known.endswith(f".{end}")), None)
        if parts is None:
            tried = (known, known.removeprefix("transformer."))  # some are named after the model without its head
            stored = next(filter(None, (names.get_name(name, try_suffixes=(".weight", ".bias")) for name in tried)), None)
            assert stored is not None, entry.hf_name
            parts = {stored: len(entry.names)}
        else:
            block = re.search(r"\.(\d+)\.", known)
            assert block is not None, entry.hf_name
            parts = {f"blk.{block[1]}.{name}": count for name, count in parts.items()}
        weights = cycle(entry.names)
        for stored, count in parts.items():
            groups = entry.groups if stored.endswith(("attn_q.weight", "ssm_ba.weight")) else 1
            tensor = replace(entry, names=tuple(islice(weights, count)), transposed=False, groups=groups, expert=None)
            yield _row(config, architecture, stored, tensor)
    for name, change in architecture.constants(config).items():
        yield GGUFTensor(name, StockTensor(name, (), constant=1.0), change=change)


def _row(config: Any, architecture: Architecture, name: str, tensor: StockTensor) -> GGUFTensor:
    """A tensor of a file, with what the architecture does to it."""
    if not getattr(config, "experts", 0):  # a shared expert beside no others is a feed-forward
        name = name.replace("_shexp", "")
    row = GGUFTensor(name, tensor)
    kind, linear = row.kind, ".linear_attn." in tensor.hf_name
    order = (-1, 2, config.head_dim // 2, 1) if architecture.neighbors and kind in ("attn_q.weight", "attn_k.weight") else None
    if architecture.tiled and linear and kind != "ssm_norm.weight":
        order = (1, config.linear_key_heads, config.linear_value_heads // config.linear_key_heads, -1)
    shifted = architecture.shifted and kind.endswith("norm.weight") and kind != "ssm_norm.weight"
    change = _SHIFTED if shifted else {**_CHANGES, **architecture.changes(config)}.get(kind)
    return replace(row, order=order, dim=int(kind == "ssm_out.weight"), change=change)


def add_settings(writer: GGUFWriter, config: Any, tokens: Tokens, *, name: str, file_type: int) -> None:
    """Add the sizes of the model and its tokenizer."""
    writer.add_name(name)
    writer.add_file_type(file_type)
    for setting, value in {**_settings(config), **architecture_of(config).settings(config)}.items():
        if value is not None:
            getattr(writer, f"add_{setting}")(value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokens.split)
    writer.add_token_list(tokens.texts)
    writer.add_token_types(tokens.kinds)
    writer.add_token_merges(tokens.merges)
    for role, index in tokens.ids.items():
        getattr(writer, f"add_{role}_token_id")(index)
    writer.add_add_bos_token(tokens.begins_with_bos)
    writer.add_add_eos_token(tokens.ends_with_eos)
    if tokens.chat_template is not None:
        writer.add_chat_template(tokens.chat_template)


def _settings(config: Any) -> dict[str, Any]:
    """Name in GGUFWriter -> value, of what most architectures have; None for none."""
    values = dict(vocab_size=config.vocab_size, context_length=config.max_positions, embedding_length=config.hidden)
    values |= dict(block_count=config.layers, head_count=config.heads, head_count_kv=config.kv_heads)
    values |= dict(feed_forward_length=config.ffn_hidden, sliding_window=getattr(config, "window", None))
    if isinstance(config, LayerNormConfig):
        values |= dict(layer_norm_eps=config.norm_eps)
    else:
        values |= dict(layer_norm_rms_eps=config.norm_eps, key_length=config.head_dim, value_length=config.head_dim)
    if hasattr(config, "rope_theta"):
        rotated = rotated_dims(config.head_dim, getattr(config, "partial_rotary_factor", 1.0))
        values |= dict(rope_dimension_count=rotated, rope_freq_base=config.rope_theta)
    if getattr(config, "experts", 0):
        values |= dict(expert_count=config.experts, expert_used_count=config.top_k)
    if getattr(config, "experts", 0) and hasattr(config, "shared_ffn_hidden"):
        expert = getattr(config, "expert_ffn_hidden", config.ffn_hidden)
        values |= dict(expert_feed_forward_length=expert, expert_shared_feed_forward_length=config.shared_ffn_hidden)
    return values
