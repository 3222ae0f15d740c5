"""Models in GGUF: which are supported, the names and the order of their tensors, and their sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pipeline.common.errors import UserError, Violation
from pipeline.models import registry
from pipeline.models.config import ModelConfig
from pipeline.models.stock_tensors import StockTensor
from pipeline.quantization.gguf_tokens import Tokens

if TYPE_CHECKING:
    from gguf import GGUFWriter


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF, for a Hugging Face class.

    Attributes:
        name: in GGUF.
        family: of ours.
        requires: field of our configuration -> the only value that llama.cpp computes.
        neighbors: rotates neighboring elements of a head instead of its halves, so that outputs of queries and keys are reordered.
        shifted: norms are stored with 1 added.
        stock: field of our configuration -> the only value with which stock transformers reads the file; None: it does not read it.
    """

    name: str
    family: str
    requires: Mapping[str, Any] = field(default_factory=dict)
    neighbors: bool = False
    shifted: bool = False
    stock: Mapping[str, Any] | None = field(default_factory=dict)


_PLAIN = {"rope_scaling": "none", "attention_bias": False}
_GEMMA3 = {"sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "head_dim": 256, "rope_local_theta": 1e4}
#: Hugging Face class -> architecture. transformers does not read the width of heads of Qwen 3, nor vocabulary and positions of GPT-2.
ARCHITECTURES = {
    "LlamaForCausalLM": Architecture("llama", "llama", _PLAIN, neighbors=True),
    "Qwen2ForCausalLM": Architecture("qwen2", "llama", _PLAIN),
    "Qwen3ForCausalLM": Architecture("qwen3", "llama", _PLAIN, stock={"head_dim": 128}),
    "MistralForCausalLM": Architecture("llama", "mistral", {"window": None}, neighbors=True),
    "MixtralForCausalLM": Architecture("llama", "mixtral", {"window": None}, neighbors=True, stock=None),
    "Olmo2ForCausalLM": Architecture("olmo2", "olmo2", _PLAIN, stock=None),
    "SmolLM3ForCausalLM": Architecture("smollm3", "smollm3", {**_PLAIN, "no_rope_layer_interval": 4}, neighbors=True, stock=None),
    "GPT2LMHeadModel": Architecture("gpt2", "gpt", stock={"vocab_size": 50257, "max_positions": 1024}),
    "BloomForCausalLM": Architecture("bloom", "bloom"),
    "Gemma3ForCausalLM": Architecture("gemma3", "gemma3", {**_PLAIN, **_GEMMA3}, shifted=True),
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
    if differences:
        raise UserError(
            [
                Violation("stage.format", "gguf", f"is not supported with model.{name}={getattr(config, name)}, only with {value}", fix)
                for name, value in differences.items()
            ]
        )


def architecture_of(config: ModelConfig) -> Architecture:
    """Return the architecture of a model."""
    return ARCHITECTURES[registry.mapping_of(config).architecture]


def is_read_by_transformers(config: ModelConfig) -> bool:
    """Whether stock transformers computes the model from the file."""
    stock = architecture_of(config).stock
    return stock is not None and not _differences(config, stock)


def _differences(config: ModelConfig, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a configuration does not have, of the fields that it has."""
    return {name: value for name, value in wanted.items() if getattr(config, name, value) != value}


@dataclass(frozen=True)
class Row:
    """A tensor of a file.

    Attributes:
        name: in GGUF.
        tensor: the weights that it contains.
        width: of heads whose outputs are reordered, 0 for other tensors.
        shifted: 1 is added.
    """

    name: str
    tensor: StockTensor
    width: int = 0
    shifted: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is fp32 in files of any type, as llama.cpp expects; vectors are, too."""
        return self.name == "position_embd.weight" or self.name.endswith(".ffn_gate_inp.weight")

    def to_file(self, weights: list[Tensor]) -> Tensor:
        """Return the tensor, from our weights."""
        value = self.tensor.to_hf(weights)
        if self.width:
            value = value.unflatten(0, (-1, 2, self.width // 2)).transpose(1, 2).flatten(0, 2).contiguous()
        return value + 1 if self.shifted else value

    def from_file(self, value: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
        """Return our weights, the inverse of to_file."""
        value = value - 1 if self.shifted else value
        if self.width:
            value = value.unflatten(0, (-1, self.width // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()
        return self.tensor.from_hf(value, shapes)


def rows(config: ModelConfig) -> Iterator[Row]:
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
        stored = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert stored is not None, entry.hf_name
        tensor = replace(entry, transposed=False, groups=1, expert=None)
        reordered = architecture.neighbors and stored.endswith((".attn_q.weight", ".attn_k.weight"))
        shifted = architecture.shifted and stored.endswith("norm.weight")
        yield Row(stored, tensor, config.head_dim if reordered else 0, shifted)


def add_settings(writer: GGUFWriter, config: Any, tokens: Tokens, *, name: str, file_type: int) -> None:
    """Add the sizes of the model and its tokenizer."""
    writer.add_name(name)
    writer.add_file_type(file_type)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn_hidden)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    if hasattr(config, "rope_theta"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_theta)
        writer.add_layer_norm_rms_eps(config.norm_eps)
    else:
        writer.add_layer_norm_eps(config.norm_eps)
    if getattr(config, "experts", 0):
        writer.add_expert_count(config.experts)
        writer.add_expert_used_count(config.top_k)
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
