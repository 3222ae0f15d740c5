"""GGUF, the format of llama.cpp, for the family llama: Llama, Qwen 2.5 and Qwen 3. Written by the package gguf."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint.original import TokenIds
from pipeline.checkpoint.weights import Weights
from pipeline.common.atomic_files import apply_umask
from pipeline.common.errors import UserError, Violation
from pipeline.common.progress import Progress
from pipeline.config.run_tokenizer import end_of_document
from pipeline.data.tokenize import chat_template
from pipeline.data.tokenize.tokenizer import load
from pipeline.models import registry
from pipeline.models.config import ModelConfig
from pipeline.models.stock_tensors import StockTensor

if TYPE_CHECKING:
    from gguf import GGUFWriter

log = logging.getLogger("pipeline")

FILE = "model.gguf"
#: Hugging Face class -> architecture of GGUF. That of llama rotates neighboring elements of a head instead of its halves.
_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
#: stage.quantize (or the dtype, without it) -> type of matrices, and the number of the file type of llama.cpp.
_TYPES = {"fp32": ("F32", 0), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7), "q4_0": ("Q4_0", 2)}
#: Start of the regular expression that splits words -> its name in llama.cpp.
_SPLITS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|": "qwen2",
}


@dataclass(frozen=True)
class Tokens:
    """A byte-level BPE tokenizer as GGUF stores it.

    Attributes:
        texts: of all ids.
        kinds: gguf.TokenType of each: 1 normal, 3 control, 4 user-defined, 5 unused.
        merges: in order of their rank.
        split: name of the regular expression that splits words.
        ids: name in GGUF of a token with a role -> its id: bos, eos, eot and eom, which all end a text, and padding.
        begins_with_bos: whether bos precedes every text that is tokenized.
        chat_template: None without one.
    """

    texts: list[str]
    kinds: list[int]
    merges: list[str]
    split: str
    ids: dict[str, int]
    begins_with_bos: bool
    chat_template: str | None


def check(config: ModelConfig, quantize: str) -> None:
    """Refuse a model or a type that cannot be written.

    Raises:
        UserError: with all violations.
    """
    violations = []
    fix = "set stage.format=huggingface"
    if quantize == "q4_k":
        rule = "cannot be written: the package gguf decodes this type, and does not encode it"
        violations.append(
            Violation("stage.quantize", quantize, rule, "set stage.quantize=q4_0 (4.5 bits), or convert a q8_0 file by llama-quantize")
        )
    if config.family != "llama":
        violations.append(Violation("stage.format", "gguf", f"is supported for model.family=llama; this is {config.family}", fix))
    elif (scaling := getattr(config, "rope_scaling", "none")) != "none":
        violations.append(Violation("stage.format", "gguf", f"is not supported with model.rope_scaling={scaling}", fix))
    elif getattr(config, "attention_bias", False):
        violations.append(Violation("stage.format", "gguf", "is not supported with model.attention_bias=true", fix))
    try:
        import gguf  # noqa: F401
    except ModuleNotFoundError:
        violations.append(Violation("stage.format", "gguf", "requires the package gguf", "pip install '.[gguf]'"))
    if violations:
        raise UserError(violations)


def read_tokens(folder: Path, vocab_size: int, named: TokenIds) -> Tokens:
    """Read a tokenizer.

    Args:
        folder: with tokenizer.json.
        vocab_size: rows of the embedding; ids without a token are unused.
        named: the tokens with which texts begin and end.

    Raises:
        UserError: it is not a byte-level BPE tokenizer, or splits words in a way that llama.cpp has no name for.
    """
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    split = _split(content.get("pre_tokenizer") or {})
    if content["model"].get("type") != "BPE" or split is None:
        rule = "is not a byte-level BPE tokenizer that splits words as GPT-2, Llama 3 or Qwen do, which stage.format=gguf requires"
        raise UserError.of("tokenizer.path", folder, rule, "set stage.format=huggingface")
    texts, kinds = [f"[PAD{index}]" for index in range(vocab_size)], [5] * vocab_size
    for text, index in content["model"]["vocab"].items():
        texts[index], kinds[index] = text, 1
    for token in content.get("added_tokens", []):
        texts[token["id"]], kinds[token["id"]] = token["content"], 3 if token["special"] else 4
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    ids = _ends({index: texts[index] for index in named.ends if index < vocab_size}, end_of_document(folder))
    ids |= {role: index for role, index in (("bos", named.bos), ("pad", named.pad)) if index is not None and index < vocab_size}
    begins = "bos" in ids and load(folder).encode("a", add_special_tokens=True).ids[:1] == [ids["bos"]]
    template = chat_template.load(folder)
    return Tokens(texts, kinds, merges, split, ids, begins, None if template is None else template.text)


def _ends(ends: dict[int, str], preferred: str | None) -> dict[str, int]:
    """Return the ids of eos, eot and eom, the tokens of which any ends a text in llama.cpp.

    Args:
        ends: id -> text of each.
        preferred: the text of the one that is eos, if it is among them.
    """
    first = next((index for index, text in ends.items() if text == preferred), next(iter(ends), None))
    ids = {} if first is None else {"eos": first}
    others = sorted((index for index in ends if index != first), key=lambda index: "eom" in ends[index])
    roles = ["eom"] if len(others) == 1 and "eom" in ends[others[0]] else ["eot", "eom"]
    ids |= dict(zip(roles, others, strict=False))
    if left := [ends[index] for index in others[2:]]:
        log.warning("convert: a GGUF file names three tokens that end a text; those of %s are left out: %s", FILE, ", ".join(left))
    return ids


def _split(pre_tokenizer: dict[str, Any]) -> str | None:
    """The name of the way in which words are split; None without a name."""
    if pre_tokenizer.get("type") == "ByteLevel":
        return "gpt-2" if pre_tokenizer.get("use_regex", True) else None
    parts = pre_tokenizer.get("pretokenizers", [])
    if [part["type"] for part in parts] != ["Split", "ByteLevel"]:
        return None
    pattern = parts[0]["pattern"].get("Regex", "")
    return next((name for start, name in _SPLITS.items() if pattern.startswith(start)), None)


def write(path: Path, weights: Weights, config: ModelConfig, tokens: Tokens, *, kind: str, name: str) -> int:
    """Write a file, with one tensor in memory at a time.

    Args:
        path: of the file.
        weights: weights of the checkpoint.
        config: the model configuration.
        tokens: the tokenizer.
        kind: stage.quantize, or fp32 or bf16. Matrices have this type, vectors are fp32. A matrix whose rows are no multiple of its blocks
            of 32 weights is stored as F16.
        name: general.name.

    Returns:
        Number of parameters written.
    """
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import quant_shape_to_byte_shape, quantize

    writer = GGUFWriter(path, _ARCHITECTURES[registry.mapping_of(config).architecture])
    _add_settings(writer, config, tokens, name=name, file_type=_TYPES[kind][1])
    wanted, plain, fallback = (GGMLQuantizationType[kind_name] for kind_name in (_TYPES[kind][0], "F32", "F16"))
    rows = {}
    for stored, row in _rows(config):
        shape = row.shape([weights.shape(part) for part in row.names])
        blocked = kind.startswith("q") and shape[-1] % 32 != 0
        rows[stored] = row, shape, plain if len(shape) == 1 else fallback if blocked else wanted
    for stored, (_, shape, type_) in rows.items():
        byte_shape = quant_shape_to_byte_shape(shape, type_)
        writer.add_tensor_info(stored, byte_shape, np.dtype(np.uint8), int(np.prod(byte_shape)), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    with Progress(len(rows), "writing weights", "tensors") as progress:
        for stored, (row, _, type_) in rows.items():
            value = row.to_hf([weights.tensor(part) for part in row.names])
            if _is_interleaved(config, stored):
                value = _interleave(value, config.head_dim)
            writer.write_tensor_data(quantize(value.float().numpy(), type_).view(np.uint8))
            progress.advance(1, stored)
    writer.close()
    apply_umask(path)
    return sum(int(np.prod(shape)) for _, shape, _ in rows.values())


class FileWeights:
    """The weights of a file, dequantized, with the interface of a checkpoint.

    Args:
        path: of the file.
        weights: weights of the checkpoint, for their shapes.
        config: the model configuration.
    """

    def __init__(self, path: Path, weights: Weights, config: ModelConfig) -> None:
        from gguf import GGUFReader

        self._weights, self._config = weights, config
        stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
        self._places = {name: (stored[stored_name], row) for stored_name, row in _rows(config) for name in row.names}
        self.bytes = sum(tensor.n_bytes for tensor in stored.values())

    def names(self) -> list[str]:
        """Names of all weights."""
        return list(self._weights.names())

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a weight."""
        return self._weights.shape(name)

    def tensor(self, name: str) -> Tensor:
        """Return a full weight, fp32."""
        from gguf.quants import dequantize

        tensor, row = self._places[name]
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if _is_interleaved(self._config, tensor.name):
            value = _deinterleave(value, self._config.head_dim)
        return row.from_hf(value, [self.shape(part) for part in row.names])[row.names.index(name)]


def _rows(config: ModelConfig) -> Iterator[tuple[str, StockTensor]]:
    """The tensors: name in GGUF, and their row. A tied head is not stored."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architectures = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(architectures[_ARCHITECTURES[registry.mapping_of(config).architecture]], config.layers)
    for row in registry.stock_tensors(config)[0]:
        stored = names.get_name(row.hf_name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, row.hf_name
        yield stored, row


def _is_interleaved(config: ModelConfig, stored: str) -> bool:
    """Whether a tensor has the order of outputs of the architecture llama."""
    own = _ARCHITECTURES[registry.mapping_of(config).architecture] == "llama"
    return own and stored.endswith((".attn_q.weight", ".attn_k.weight"))


def _deinterleave(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse of _interleave."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _interleave(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder the outputs of each head: the two halves alternate."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _add_settings(writer: GGUFWriter, config: Any, tokens: Tokens, *, name: str, file_type: int) -> None:
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
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokens.split)
    writer.add_token_list(tokens.texts)
    writer.add_token_types(tokens.kinds)
    writer.add_token_merges(tokens.merges)
    for role, index in tokens.ids.items():
        getattr(writer, f"add_{role}_token_id")(index)
    writer.add_add_bos_token(tokens.begins_with_bos)
    if tokens.chat_template is not None:
        writer.add_chat_template(tokens.chat_template)
