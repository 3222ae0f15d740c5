"""Exports a checkpoint as a Hugging Face folder that stock `transformers` loads, with one tensor in memory at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from pipeline.checkpoint.weights import PartReader, Weights
from pipeline.common.errors import UserError, Violation
from pipeline.config import loss_weights
from pipeline.conversion import safetensors_file
from pipeline.conversion.export_files import ExportWriter, OutputFile, Written, digest_of
from pipeline.conversion.huggingface_import import GENERATION_CONFIG
from pipeline.conversion.original import Original
from pipeline.conversion.stock_weights import SEPARATE
from pipeline.data.tokenize import chat_template
from pipeline.data.tokenize.chat_encoding import ChatEncoder
from pipeline.data.tokenize.chat_template import ChatTemplate
from pipeline.data.tokenize.tokenizer import TextEncoder, load, special_token
from pipeline.models import registry
from pipeline.models.config import ModelConfig
from pipeline.models.stock_tensors import Shape, StockTensor

#: Files of a tokenizer folder; only tokenizer.json is required. The vocabularies are those of tokenizers without it.
VOCABULARIES = (
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("source.spm", "target.spm", "target_vocab.json"),
)
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("tokenization_of_file.py", *VOCABULARIES),
)

#: transformers reads the tokenizers of these model types by a class of its own with a fixed pre-tokenizer, whatever tokenizer.json and
#: tokenizer_class say. It does not do so if the folder names code of its own, which is not run unless trust_remote_code asks for it.
OWN_TOKENIZERS = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
OF_FILE = "PreTrainedTokenizerFast"
CODE = f"""from transformers import {OF_FILE}


class TokenizerOfFile({OF_FILE}):
    \"\"\"The tokenizer of tokenizer.json as it is.\"\"\"
"""

#: Folder of further chat templates with names.
TEMPLATES = "additional_chat_templates"


class Packing(Protocol):
    """Tensors that are stored in another form, such as quantized ones."""

    def size(self, entry: StockTensor, shape: Shape) -> int | None:
        """Bytes that are stored for a tensor; None if it is stored as it is."""

    def tensors(self, entry: StockTensor) -> dict[str, Tensor] | None:
        """Names and values that are stored for a tensor; None if it is stored as it is."""


def write_weights(
    folder: Path,
    weights: Weights,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    shard_bytes: int,
    packing: Packing | None = None,
    writer: ExportWriter | None = None,
) -> int:
    """Write model.safetensors, or its numbered shards and their index; tensors that the class does not expect are in other files.

    Args:
        shard_bytes: maximum file size; a larger tensor gets a separate file.
        writer: shares the files among ranks; by default this process writes all of them. Collective.

    Returns:
        Number of parameters written.

    Raises:
        UserError: a weight is too large for the dtype.
        CheckFailed: a file does not hold the weights of the checkpoint.
    """
    writer = writer or ExportWriter()
    entries = {entry.hf_name: entry for entry in registry.stock_tensors(config)[0]}
    shapes = {name: entry.shape([weights.shape(part) for part in entry.names]) for name, entry in entries.items()}
    elements = {name: prod(shape) for name, shape in shapes.items()}
    packed = {name: packing.size(entry, shapes[name]) if packing else None for name, entry in entries.items()}
    sizes = {name: elements[name] * dtype.itemsize if size is None else size for name, size in packed.items()}
    patterns = registry.mapping_of(config).separate_weights(config)
    separate = {name for name in entries if any(fnmatchcase(name, pattern) for pattern in patterns)}
    splits, files = {}, []
    for stem, chosen in [("model", entries.keys() - separate), *([(SEPARATE, separate)] if separate else [])]:
        splits[stem] = split_state_dict_into_shards_factory(
            {name: size for name, size in sizes.items() if name in chosen},
            get_storage_size=int,
            filename_pattern=stem + "{suffix}.safetensors",
            max_shard_size=shard_bytes,
        )
        for file, names in splits[stem].filename_to_tensors.items():
            shard = _HuggingFaceFile(weights, {name: entries[name] for name in names}, dtype, packing)
            files.append(OutputFile(file, sum(sizes[name] for name in names), shard.write, shard.read))
    stored = writer.write(folder, files)
    for stem, split in splits.items():
        if split.is_sharded and writer.is_first:
            index = {"metadata": split.metadata, "weight_map": {name: file for file in split.filename_to_tensors for name in stored[file]}}
            _write_json(folder / f"{stem}.safetensors.index.json", index)
    return sum(count for name, count in elements.items() if entries[name].constant is None)


class _HuggingFaceFile:
    """Writes and reads a file of a Hugging Face folder.

    Args:
        entries: the tensors of the file, by name, in their order.
    """

    def __init__(self, weights: Weights, entries: dict[str, StockTensor], dtype: torch.dtype, packing: Packing | None) -> None:
        self._weights, self._entries, self._dtype, self._packing = weights, entries, dtype, packing
        self._shapes = {name: [weights.shape(part) for part in entry.names] for name, entry in entries.items()}

    def write(self, path: Path, written: Written) -> tuple[list[str], str | None]:
        """Write the file; see OutputFile. The other functions need the names of its tensors."""
        read = PartReader(self._weights, self._dtype)
        if self._packing is not None:
            return self._write_packed(path, read, written), None

        def tensor(name: str) -> Tensor:
            entry = self._entries[name]
            parts = read(entry)
            value = entry.to_hf(parts).to(self._dtype)
            pieces = [part if entry.expert is None else part[entry.expert] for part in parts]
            written(name, digest_of(pieces or [value]), value.nbytes)
            return value

        shapes = {name: entry.shape(self._shapes[name]) for name, entry in self._entries.items()}
        return list(shapes), safetensors_file.write(path, shapes, self._dtype, tensor, {"format": "pt"})

    def read(self, path: Path) -> Iterator[tuple[str, str]]:
        """Yield what the file holds, as weights of the checkpoint; see OutputFile."""
        if self._packing is not None:
            yield from ((name, digest_of([value])) for name, value in safetensors_file.tensors(path))
            return
        for name, value in safetensors_file.tensors(path):
            entry = self._entries[name]
            yield name, digest_of(entry.from_hf(value, self._shapes[name]) if entry.names else [value])

    def _write_packed(self, path: Path, read: PartReader, written: Written) -> list[str]:
        """Write a file whose tensors have several dtypes."""
        packing, digests = self._packing, {}
        assert packing is not None

        def stored() -> Iterator[tuple[str, Tensor]]:
            for name, entry in self._entries.items():
                for part, value in (packing.tensors(entry) or {name: entry.to_hf(read(entry)).to(self._dtype)}).items():
                    digests[part] = digest_of([value]), value.nbytes
                    yield part, value

        for name in safetensors_file.write_mixed(path, stored(), {"format": "pt"}):
            written(name, *digests[name])
        return list(digests)


def check_weights(weights: Weights, config: ModelConfig, key: str, path: Path) -> None:
    """Verify names and shapes of a checkpoint's weights against the model that its configuration describes.

    Raises:
        UserError: weights are missing, unexpected or of another shape; one violation each, with the configuration key of the checkpoint.
    """
    expected = registry.weight_shapes(config)
    shapes = {name: tuple(weights.shape(name)) for name in weights.names()}
    wrong = [f"{name} is missing, {list(shape)} expected" for name, shape in expected.items() if name not in shapes]
    wrong += [f"{name} {list(shape)} is not a weight of the model" for name, shape in shapes.items() if name not in expected]
    wrong += [
        f"{name} is {list(shapes[name])}, not {list(expected[name])}"
        for name in expected.keys() & shapes.keys()
        if shapes[name] != expected[name]
    ]
    UserError.raise_for(Violation(key, path, problem, "choose a checkpoint that stage=pretrain finished") for problem in wrong)


def write_configs(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    end_of_document_id: int,
    bos_id: int | None = None,
    padding_id: int | None = None,
    original: Original | None = None,
    quantization: dict[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and generation_config.json.

    The end-of-document token is the end-of-sequence token, and without `bos_id` also that of the beginning. An encoder-decoder's decoder
    starts with the padding token if there is one. A model that started from a Hugging Face model keeps both files, if it has them.
    `quantization` becomes the key quantization_config. `training` is the group of the run, for the keys that configure training.
    """
    mapping = registry.mapping_of(config)
    extra: dict[str, Any] = {"torch_dtype": str(dtype).removeprefix("torch.")}
    weights = loss_weights.defaults(config) | {name: value for name, value in (training or {}).items() if value is not None}
    extra |= {key: weights[name] for key, name in mapping.training_keys.items() if name in weights}
    extra |= {} if quantization is None else {"quantization_config": quantization}
    if original is not None:
        _write_json(folder / "config.json", original.config_json(mapping.config_json(config)) | extra)
        if original.generation is not None:
            _write_json(folder / GENERATION_CONFIG, original.generation)
        return
    ids = {"bos_token_id": end_of_document_id if bos_id is None else bos_id, "eos_token_id": end_of_document_id}
    if mapping.constants.get("is_encoder_decoder"):
        padding = end_of_document_id if padding_id is None else padding_id
        ids |= {"pad_token_id": padding, "decoder_start_token_id": padding}
    _write_json(folder / "config.json", mapping.config_json(config) | ids | extra)
    _write_json(folder / GENERATION_CONFIG, {"pad_token_id": end_of_document_id} | ids)


def copy_tokenizer(source: Path, folder: Path, *, end_of_document: str, max_positions: int) -> None:
    """Copy the tokenizer files; write tokenizer_config.json if the source has none. config.json is read, where the folder has one."""
    copy_tokenizer_files(source, folder)
    path = folder / "tokenizer_config.json"
    if not path.exists():
        content = {
            "tokenizer_class": OF_FILE,
            "bos_token": end_of_document,
            "eos_token": end_of_document,
            "model_max_length": max_positions,
        }
        _write_json(path, content)
    settings = json.loads(path.read_text(encoding="utf-8"))
    model = json.loads((folder / "config.json").read_text(encoding="utf-8")) if (folder / "config.json").exists() else {}
    if model.get("model_type") in OWN_TOKENIZERS and settings.get("tokenizer_class") in (OF_FILE, "TokenizersBackend"):
        _write_json(path, {**settings, "auto_map": {"AutoTokenizer": [None, "tokenization_of_file.TokenizerOfFile"]}})
        (folder / "tokenization_of_file.py").write_text(CODE, encoding="utf-8")


def write_bos(folder: Path, encoder: TextEncoder) -> None:
    """Let an exported tokenizer begin texts as those of the training did (tokenizer.bos).

    Without a token that begins texts, bos_token becomes the end-of-document token, which lm-eval puts before texts without context.
    """
    follows, bos = encoder.follows_tokenizer, encoder.end_of_document if encoder.bos is None else encoder.bos
    vocabulary = load(folder).get_vocab(with_added_tokens=True)
    text_of = {number: text for text, number in vocabulary.items()}
    if follows and (encoder.bos is None or special_token(folder, "bos_token") == text_of[bos]):
        return
    changed = {"tokenizer_config.json": {"add_bos_token": encoder.bos is not None}, "special_tokens_map.json": {}}
    for name, keys in changed.items():
        if (folder / name).is_file():
            settings = json.loads((folder / name).read_text(encoding="utf-8"))
            _write_json(folder / name, {**settings, **keys, "bos_token": text_of[bos]})
    if follows:
        return
    content = json.loads((path := folder / "tokenizer.json").read_text(encoding="utf-8"))
    before, after = ([{"SpecialToken": {"id": text_of[token], "type_id": 0}} for token in side] for side in encoder.around)
    first, second = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
    names = [text_of[token] for side in encoder.around for token in side]
    template = {
        "type": "TemplateProcessing",
        "single": [*before, first, *after],
        "pair": [*before, first, *after, *before, second, *after],
        "special_tokens": {text: {"id": text, "ids": [vocabulary[text]], "tokens": [text]} for text in names},
    }
    old = content.get("post_processor") or {}
    kept = [processor for processor in old.get("processors", [old]) if processor.get("type") == "ByteLevel"]
    _write_json(path, {**content, "post_processor": {"type": "Sequence", "processors": [*kept, template]}})


def write_chat_template(folder: Path, template: ChatTemplate) -> None:
    """Write the template of a fine-tuned model, and stop its completions at the token with which the template ends an answer.

    Args:
        folder: the export, with its tokenizer and its generation_config.json.
    """
    (folder / chat_template.FILE).write_text(template.text, encoding="utf-8")
    turn = chat_template.end_of_turn(template, ChatEncoder(load(folder)))
    path = folder / GENERATION_CONFIG
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    named = content.get("eos_token_id", [])
    ends = named if isinstance(named, list) else [named]
    if turn is not None and turn not in ends:
        _write_json(path, {**content, "eos_token_id": [*ends, turn]})


def copy_tokenizer_files(source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer that are there."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    for template in sorted((source / TEMPLATES).glob("*.jinja")):
        (folder / TEMPLATES).mkdir(exist_ok=True)
        shutil.copyfile(template, folder / TEMPLATES / template.name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
