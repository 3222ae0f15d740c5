"""Models in GGUF: which are supported, the names and the order of their tensors, and their sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.common.errors import UserError, Violation
from pipeline.layers.gated_delta_net import LENGTH_EPS
from pipeline.models import registry
from pipeline.models.config import ModelConfig
from pipeline.models.shared_sizes import DecoderConfig, rotated_dims
from pipeline.models.stock_tensors import Shape, StockTensor
from pipeline.quantization.gguf_tokens import Tokens

if TYPE_CHECKING:
    from gguf import GGUFWriter


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF, for a Hugging Face class.

    Attributes:
        name: in GGUF.
        family: of ours.
        requires: field of our configuration -> the only value that llama.cpp computes, or what returns it.
        neighbors: rotates neighboring elements of a head instead of its halves, so that outputs of queries and keys are reordered.
        shifted: norms are stored with 1 added, but those of the outputs of linear attention.
        tiled: the value heads of linear attention are stored in turn, one of each key head after the other.
        settings: name in GGUFWriter -> field of our configuration, of what only some architectures have.
        stock: field of our configuration -> the only value with which stock transformers reads the file; None: it does not read it.
    """

    name: str
    family: str
    requires: Mapping[str, Any] = field(default_factory=dict)
    neighbors: bool = False
    shifted: bool = False
    tiled: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    stock: Mapping[str, Any] | None = field(default_factory=dict)


_PLAIN = {"rope_scaling": "none", "attention_bias": False}
_GEMMA3 = {"sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "head_dim": 256, "rope_local_theta": 1e4}
# Settings of architectures with recurrent layers.
_MAMBA = {"ssm_conv_kernel": "mamba_kernel", "ssm_state_size": "mamba_state", "ssm_time_step_rank": "mamba_heads"}
_GRANITE = {
    "attention_scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "rope_scaling_finetuned": "rotary",
}
_NEMOTRON = {
    "ssm_group_count": "mamba_groups",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "groups",
    "expert_group_used_count": "topk_group",
}
_LINEAR = {
    "ssm_conv_kernel": "linear_kernel",
    "ssm_state_size": "linear_key_dim",
    "ssm_group_count": "linear_key_heads",
    "ssm_time_step_rank": "linear_value_heads",
    "full_attention_interval": "full_attention_interval",
}
# What llama.cpp takes for granted in them.
# llama.cpp has one eps for the norms of the stream and for the lengths of queries and keys.
_ONE_WIDTH = {"rope_scaling": "none", "norm_eps": LENGTH_EPS, "linear_value_dim": lambda config: config.linear_key_dim}
_EXPERTS = {"norm_topk_prob": True, "expert_interval": 1, "dense_blocks": []}
_TWICE = {"rope_scaling": "none", "mamba_head_dim": lambda config: Fraction(2 * config.hidden, config.mamba_heads)}
#: Hugging Face class -> architecture. transformers does not read the width of heads of Qwen 3, nor vocabulary and positions of GPT-2.
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", "llama", _PLAIN, neighbors=True),
    "Qwen2ForCausalLM": Architecture("qwen2", "llama", _PLAIN),
    "Qwen3ForCausalLM": Architecture("qwen3", "llama", _PLAIN, stock={"head_dim": 128}),
    "MistralForCausalLM": Architecture("llama", "mistral", {"window": None}, neighbors=True),
    "MixtralForCausalLM": Architecture("llama", "mixtral", {"window": None}, neighbors=True, stock=None),
    "Olmo2ForCausalLM": Architecture("olmo2", "olmo2", {**_PLAIN, "head_width": None}, stock=None),
    "SmolLM3ForCausalLM": Architecture("smollm3", "smollm3", {**_PLAIN, "no_rope_layer_interval": 4}, neighbors=True, stock=None),
    "GPT2LMHeadModel": Architecture("gpt2", "gpt", stock={"vocab_size": 50257, "max_positions": 1024}),
    "BloomForCausalLM": Architecture("bloom", "bloom"),
    "Gemma3ForCausalLM": Architecture("gemma3", "gemma3", {**_PLAIN, **_GEMMA3}, shifted=True),
    "GraniteMoeHybridForCausalLM": Architecture(
        "granitehybrid", "granite_hybrid", _TWICE, neighbors=True, settings=_MAMBA | _GRANITE, stock=None
    ),
    "NemotronHForCausalLM": Architecture("nemotron_h", "nemotron_h", {"mamba_smallest_step": 0}, settings=_MAMBA | _NEMOTRON, stock=None),
    "Qwen3NextForCausalLM": Architecture("qwen3next", "qwen3_next", {**_ONE_WIDTH, **_EXPERTS}, shifted=True, settings=_LINEAR, stock=None),
    "Qwen3_5ForCausalLM": Architecture("qwen35", "qwen3_5", _ONE_WIDTH, shifted=True, tiled=True, settings=_LINEAR, stock=None),
    "Qwen3_5MoeForCausalLM": Architecture("qwen35moe", "qwen3_5_moe", _ONE_WIDTH, shifted=True, tiled=True, settings=_LINEAR, stock=None),
}


def check(config: ModelConfig) -> None:
    """Refuse a model that cannot be written.

    Raises:
        UserError: with all violations.
    """
    families = {architecture.family: None for architecture in ARCHITECTURES.values()}
    fix = "set stage.format=huggingface"
    if config.family not in families:
        rule = f"is supported for model.family={', '.join(families)}; this is {config.family}"
        raise UserError.of("stage.format", "gguf", rule, fix)
    differences = _differences(config, architecture_of(config).requires)
    rules = [
        *(f"model.{name}={getattr(config, name)}, only with {value}" for name, value in differences.items()),
        *_kinds_of_layers(config),
    ]
    if rules:
        raise UserError([Violation("stage.format", "gguf", f"is not supported with {rule}", fix) for rule in rules])


def _kinds_of_layers(config: Any) -> Iterator[str]:
    """Yield what llama.cpp does not compute: hybrids without a recurrent layer or without attention, feed-forwards beside experts."""
    if hasattr(config, "mamba_heads"):
        kinds = {config.kind(block) for block in range(config.layers)}
        if not kinds >= {"M", "*"} or kinds >= {"-", "E"}:
            yield f"model.layer_pattern={config.layer_pattern}, only with both M and *, and not with both - and E"
    if hasattr(config, "linear_key_heads") and config.linear_layers in (0, config.layers):
        interval = f"model.full_attention_interval={config.full_attention_interval}"
        yield f"{interval}, only with both linear and full attention in model.layers={config.layers}"


def architecture_of(config: ModelConfig) -> Architecture:
    """Return the architecture of a model."""
    arch = ARCHITECTURES[registry.mapping_of(config).architecture]
    return replace(arch, name="nemotron_h_moe") if arch.name == "nemotron_h" and getattr(config, "experts", False) else arch


def is_read_by_transformers(config: ModelConfig) -> bool:
    """Whether stock transformers computes the model from the file."""
    stock = architecture_of(config).stock
    return stock is not None and not _differences(config, stock)


def _differences(config: ModelConfig, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a configuration does not have, of the fields that it has."""
    values = {name: value(config) if callable(value) else value for name, value in wanted.items()}
    return {name: value for name, value in values.items() if getattr(config, name, value) != value}


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a file.

    Attributes:
        name: in GGUF.
        tensor: the weights that it contains.
        order: sizes of four dims into which a dim of the last of these weights is divided, and of which the second and third are
            transposed; None for none.
        dim: that dim.
        change: a function of each element, and its inverse; None for none.
        view: the shape in which the tensor is stored, with -1 for one of the sizes; None for its own.
    """

    name: str
    tensor: StockTensor
    order: tuple[int, ...] | None = None
    dim: int = 0
    change: tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] | None = None
    view: Shape | None = None

    @property
    def is_plain(self) -> bool:
        """Whether it is fp32 in files of any type, as llama.cpp expects; vectors are, too."""
        return self.name == "position_embd.weight" or self.name.endswith(".ffn_gate_inp.weight") or self.view is not None

    def shape(self, shapes: list[Shape]) -> Shape:
        """Return the shape of the tensor, from those of our weights."""
        shape = self.tensor.shape(shapes)
        return shape if self.view is None else tuple(torch.empty(shape, device="meta").view(self.view).shape)

    def to_file(self, weights: list[Tensor]) -> Tensor:
        """Return the tensor, from our weights."""
        value = self.tensor.to_hf([*weights[:-1], self._reordered(weights[-1], self.order)])
        value = value if self.change is None else self.change[0](value)
        return value if self.view is None else value.view(self.view)

    def from_file(self, value: Tensor, shapes: list[Shape]) -> list[Tensor]:
        """Return our weights, the inverse of to_file."""
        value = value.view(self.tensor.shape(shapes))
        value = value if self.change is None else self.change[1](value)
        *others, last = self.tensor.from_hf(value, shapes)
        inverse = None if self.order is None else tuple(self.order[index] for index in (0, 2, 1, 3))
        return [*others, self._reordered(last, inverse)]

    def _reordered(self, weight: Tensor, order: tuple[int, ...] | None) -> Tensor:
        if order is None:
            return weight
        return weight.unflatten(self.dim, order).transpose(self.dim + 1, self.dim + 2).flatten(self.dim, self.dim + 3)


_SHIFTED = (lambda value: value + 1, lambda value: value - 1)
#: The logarithm of a decay rate is stored as the negative rate.
_RATE = (lambda value: -value.exp(), lambda value: (-value).log())
#: End of a Hugging Face name -> tensors of a block in GGUF, and how many of our weights each contains; where gguf does not name them so
_BLOCK_TENSORS = {
    "dt_bias": {"ssm_dt.bias": 1},
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
        if architecture.name == "bloom":  # named after the model without its head
            known = known.removeprefix("transformer.")
        parts = next((parts for end, parts in _BLOCK_TENSORS.items() if known.endswith(f".{end}")), None)
        if parts is None:
            stored = names.get_name(known, try_suffixes=(".weight", ".bias"))
            assert stored is not None, entry.hf_name
            parts = {stored: len(entry.names)}
        else:
            block = re.search(r"\.(\d+)\.", known)
            assert block is not None, entry.hf_name
            parts = {f"blk.{block[1]}.{name}": count for name, count in parts.items()}
        weights = iter(entry.names)
        for stored, count in parts.items():
            groups = entry.groups if stored.endswith(("attn_q.weight", "ssm_ba.weight")) else 1
            tensor = replace(entry, names=tuple(islice(weights, count)), transposed=False, groups=groups, expert=None)
            yield _row(config, architecture, stored, tensor)


def _row(config: Any, architecture: Architecture, name: str, tensor: StockTensor) -> GGUFTensor:
    """A tensor of a file, with what the architecture does to it."""
    kind, linear = re.sub(r"^blk\.\d+\.", "", name), ".linear_attn." in tensor.hf_name
    order = (-1, 2, config.head_dim // 2, 1) if architecture.neighbors and kind in ("attn_q.weight", "attn_k.weight") else None
    if architecture.tiled and linear and kind != "ssm_norm.weight":
        order = (1, config.linear_key_heads, config.linear_value_heads // config.linear_key_heads, -1)
    shifted = architecture.shifted and kind.endswith("norm.weight") and kind != "ssm_norm.weight"
    change = _SHIFTED if shifted else _RATE if kind == "ssm_a" else None
    views: dict[str, Shape] = {"ffn_gate_inp_shexp.weight": (-1,)}
    if hasattr(config, "linear_key_heads"):
        views["ssm_conv1d.weight"] = (-1, config.linear_kernel)
    if hasattr(config, "mamba_heads"):
        groups = getattr(config, "mamba_groups", 1)
        views |= {"ssm_conv1d.weight": (-1, config.mamba_kernel), "ssm_a": (-1, 1), "ssm_d": (-1, 1), "ssm_norm.weight": (groups, -1)}
    if config.family == "granite_hybrid" and not config.experts:
        name = name.replace("_shexp", "")
    return GGUFTensor(name, tensor, order, int(kind == "ssm_out.weight"), change, views.get(kind))


def add_settings(writer: GGUFWriter, config: Any, tokens: Tokens, *, name: str, file_type: int) -> None:
    """Add the sizes of the model and its tokenizer."""
    writer.add_name(name)
    writer.add_file_type(file_type)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_head_count(config.heads)
    _add_layers(writer, config)
    if isinstance(config, DecoderConfig):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.norm_eps)
    if not isinstance(config, DecoderConfig) or config.family == "nemotron_h":  # whose loader requires both
        writer.add_layer_norm_eps(config.norm_eps)
    if hasattr(config, "rope_theta"):
        rotated = rotated_dims(config.head_dim, getattr(config, "partial_rotary_factor", 1.0))
        writer.add_rope_dimension_count(rotated)
        writer.add_rope_freq_base(config.rope_theta)
        if config.family in ("qwen3_5", "qwen3_5_moe"):  # time, height and width, which are equal for text
            writer.add_rope_dimension_sections([(rotated // 2 + 2 - index) // 3 for index in range(3)] + [0])
    for setting, name_ in architecture_of(config).settings.items():
        if getattr(config, "experts", 0) or not setting.startswith("expert_"):
            getattr(writer, f"add_{setting}")(getattr(config, name_))
    if getattr(config, "window", None) is not None:
        writer.add_sliding_window(config.window)
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


def _add_layers(writer: GGUFWriter, config: Any) -> None:
    """Add the sizes of feed-forwards, experts and recurrent layers. In hybrids, a layer without key heads is no attention."""
    experts = getattr(config, "experts", 0)
    feed_forward, kv_heads = config.ffn_hidden, config.kv_heads
    expert, shared = getattr(config, "expert_ffn_hidden", config.ffn_hidden), getattr(config, "shared_ffn_hidden", 0)
    if config.family == "granite_hybrid" and experts:
        feed_forward, shared = expert, config.ffn_hidden
    if hasattr(config, "mamba_heads"):
        kinds = [config.kind(block) for block in range(config.layers)]
        kv_heads = [config.kv_heads if kind == "*" else 0 for kind in kinds]
        writer.add_ssm_inner_size(config.mamba_heads * config.mamba_head_dim)
        if config.family == "nemotron_h":
            feed_forward = [{"-": config.ffn_hidden, "E": expert}.get(kind, 0) for kind in kinds]
        else:
            writer.add_ssm_group_count(1)
    if hasattr(config, "linear_key_heads"):
        writer.add_ssm_inner_size(config.linear_value_heads * config.linear_value_dim)
    writer.add_feed_forward_length(feed_forward)
    writer.add_head_count_kv(kv_heads)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.top_k)
    if experts and shared:
        writer.add_expert_feed_forward_length(expert)
        writer.add_expert_shared_feed_forward_length(shared)
