"""Exports a checkpoint as a Hugging Face folder that stock `transformers` loads, with one output shard in memory at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor

from pipeline.checkpoint.huggingface_import import GENERATION_CONFIG, SEPARATE, read_config, read_generation_config
from pipeline.common.atomic_files import apply_umask
from pipeline.common.errors import UserError, Violation
from pipeline.common.progress import Progress
from pipeline.config import loss_weights
from pipeline.data.tokenize import chat_template
from pipeline.data.tokenize.chat_encoding import ChatEncoder
from pipeline.data.tokenize.chat_template import ChatTemplate
from pipeline.data.tokenize.tokenizer import load
from pipeline.models import config_json, registry, stock_keys
from pipeline.models.config import ModelConfig
from pipeline.models.stock_tensors import Shape, StockTensor

#: Files of a tokenizer folder; only tokenizer.json is required. The vocabularies are those of tokenizers without it.
VOCABULARIES = (
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("source.spm", "target.spm", "target_vocab.json"),
)
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *VOCABULARIES,
)


#: Folder of further chat templates with names.
TEMPLATES = "additional_chat_templates"
#: Keys of an imported config.json that are not exported: about its files, or about code of its repository.
_OF_THE_FILES = frozenset(("torch_dtype", "dtype", "quantization_config", "auto_map"))


@dataclass(frozen=True)
class Original:
    """The Hugging Face model that a run started from.

    Attributes:
        content: its config.json.
        generation: its generation_config.json, None without one.
        mapped: what the export writes to config.json for a model with this config.json.
        groups: keys that only have a meaning together.
        aliases: further name of a key of config.json -> the key.
    """

    content: dict[str, Any]
    generation: dict[str, Any] | None
    mapped: dict[str, Any]
    groups: tuple[tuple[str, ...], ...]
    aliases: dict[str, str]

    def token_id(self, name: str) -> Any:
        """The value of a key such as bos_token_id; generation settings take precedence, as in transformers and vLLM."""
        return next((content[name] for content in (self.generation or {}, self.content) if content.get(name) is not None), None)

    @property
    def ends(self) -> list[int]:
        """The tokens that end a text (eos_token_id)."""
        named = self.token_id("eos_token_id")
        return [] if named is None else named if isinstance(named, list) else [named]

    def with_end(self, token: int) -> Original:
        """Return the model with a further token that ends a text, which training has taught it."""
        if token in self.ends:
            return self
        ends = {"eos_token_id": [*self.ends, token] if self.ends else token}
        generation = None if self.generation is None else {**self.generation, **ends}
        return replace(self, content={**self.content, **ends}, generation=generation)

    def config_json(self, exported: dict[str, Any]) -> dict[str, Any]:
        """Return the content of config.json: that of the import, and what has changed since (the length of the context, labels).

        Args:
            exported: what the export writes for the model.
        """
        changed = {key for key, value in exported.items() if key not in self.mapped or self.mapped[key] != value}
        changed |= {key for group in self.groups if not changed.isdisjoint(group) for key in group}
        stale = {alias for alias, key in self.aliases.items() if key in changed}
        stale |= {"num_labels", "problem_type"} if "id2label" in changed else set()  # of the labels before
        kept = {key: value for key, value in self.content.items() if key not in _OF_THE_FILES | changed | stale}
        return kept | {key: value for key, value in exported.items() if key in changed or key == "architectures"}


@dataclass(frozen=True)
class TokenIds:
    """The tokens with which texts begin and end.

    Attributes:
        bos: precedes a text, None without one.
        ends: any of them ends a text.
        pad: fills a batch, None without one.
    """

    bos: int | None
    ends: list[int]
    pad: int | None


def token_ids(original: Original | None, end_of_document: int) -> TokenIds:
    """Return the tokens that an export of a decoder names: those of the imported model, or the end-of-document token for all."""
    if original is None:
        return TokenIds(end_of_document, [end_of_document], end_of_document)
    pad = original.token_id("pad_token_id")
    return TokenIds(
        original.token_id("bos_token_id"), original.ends or [end_of_document], pad if isinstance(pad, int) and pad >= 0 else None
    )


def read_original(folder: Path) -> Original:
    """Read an imported model, from the folder with its config.json."""
    content = read_config(folder)
    family, mapping = registry.find_mapping(content)
    mapped = mapping.config_json(config_json.read(mapping, family.config, content))
    stock = stock_keys.keys_of(mapping.architecture)
    groups = tuple(group.keys for group in mapping.nested)
    return Original(content, read_generation_config(folder), mapped, groups, {} if stock is None else stock.aliases)


class Weights(Protocol):
    """Full weights by native name; a tied head has no entry."""

    def names(self) -> Iterable[str]:
        """Names of all weights."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Full shape of a weight."""

    def tensor(self, name: str) -> Tensor:
        """Full value of a weight, fp32."""


class Packing(Protocol):
    """Tensors that are stored in another form, such as quantized ones."""

    def size(self, entry: StockTensor, shape: Shape) -> int | None:
        """Bytes that are stored for a tensor; None if it is stored as it is."""

    def tensors(self, entry: StockTensor) -> dict[str, Tensor] | None:
        """Names and values that are stored for a tensor; None if it is stored as it is."""


def write_weights(
    folder: Path, weights: Weights, config: ModelConfig, *, dtype: torch.dtype, shard_bytes: int, packing: Packing | None = None
) -> int:
    """Write model.safetensors, or its numbered shards and their index; tensors that the class does not expect are in other files.

    Args:
        folder: existing output folder.
        weights: weights of the checkpoint.
        config: the model configuration.
        dtype: dtype to write.
        shard_bytes: maximum file size; a larger tensor gets a separate file.
        packing: tensors that are stored in another form.

    Returns:
        Number of parameters written.
    """
    entries = {entry.hf_name: entry for entry in registry.stock_tensors(config)[0]}
    shapes = {name: entry.shape([weights.shape(part) for part in entry.names]) for name, entry in entries.items()}
    elements = {name: prod(shape) for name, shape in shapes.items()}
    packed = {name: packing.size(entry, shapes[name]) if packing else None for name, entry in entries.items()}
    sizes = {name: elements[name] * dtype.itemsize if size is None else size for name, size in packed.items()}
    patterns = registry.mapping_of(config).separate_weights(config)
    separate = {name for name in entries if any(fnmatchcase(name, pattern) for pattern in patterns)}
    read = _Reader(weights, dtype)
    with Progress(sum(sizes.values()), "writing weights", "B") as progress:
        for stem, chosen in [("model", entries.keys() - separate), *([(SEPARATE, separate)] if separate else [])]:
            split = split_state_dict_into_shards_factory(
                {name: size for name, size in sizes.items() if name in chosen},
                get_storage_size=int,
                filename_pattern=stem + "{suffix}.safetensors",
                max_shard_size=shard_bytes,
            )
            files: dict[str, str] = {}
            for file, names in split.filename_to_tensors.items():
                shard: dict[str, Tensor] = {}
                for name in names:
                    stored = packing.tensors(entries[name]) if packing else None
                    shard |= stored or {name: entries[name].to_hf(read(entries[name])).to(dtype)}
                    progress.advance(sizes[name], file)
                save_file(shard, folder / file, metadata={"format": "pt"})
                apply_umask(folder / file)
                files |= dict.fromkeys(shard, file)
            if split.is_sharded:
                index = {"metadata": split.metadata, "weight_map": files}
                _write_json(folder / f"{stem}.safetensors.index.json", index)
    return sum(count for name, count in elements.items() if entries[name].constant is None)


class _Reader:
    """Reads the native weights of an entry. Stacked experts are cached for the next entry, which needs another slice of them."""

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype
        self._stacks: dict[str, Tensor] = {}

    def __call__(self, entry: StockTensor) -> list[Tensor]:
        if entry.expert is None:
            self._stacks = {}
            return [self._weights.tensor(name).to(self._dtype) for name in entry.names]
        cached = self._stacks
        self._stacks = {name: cached[name] if name in cached else self._weights.tensor(name).to(self._dtype) for name in entry.names}
        return list(self._stacks.values())


def check_weights(weights: Weights, config: ModelConfig, key: str, path: Path) -> None:
    """Verify names and shapes of a checkpoint's weights against the model that its configuration describes.

    Raises:
        UserError: weights are missing, unexpected or of another shape; one violation each, with the configuration key of the checkpoint.
    """
    with torch.device("meta"):
        expected = {name: tuple(parameter.shape) for name, parameter in registry.build(config).named_parameters()}
    shapes = {name: tuple(weights.shape(name)) for name in weights.names()}
    wrong = [f"{name} is missing, {list(shape)} expected" for name, shape in expected.items() if name not in shapes]
    wrong += [f"{name} {list(shape)} is not a weight of the model" for name, shape in shapes.items() if name not in expected]
    wrong += [
        f"{name} is {list(shapes[name])}, not {list(expected[name])}"
        for name in expected.keys() & shapes.keys()
        if shapes[name] != expected[name]
    ]
    if wrong:
        raise UserError([Violation(key, path, problem, "choose a checkpoint that stage=pretrain finished") for problem in wrong])


def write_configs(
    folder: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    end_of_document_id: int,
    padding_id: int | None = None,
    original: Original | None = None,
    quantization: dict[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
) -> None:
    """Write config.json and generation_config.json.

    The end-of-document token is both the beginning- and the end-of-sequence token. An encoder-decoder's decoder starts with the padding
    token if there is one. A model that started from a Hugging Face model keeps its config.json and its generation_config.json, if any.
    `quantization` becomes the key quantization_config. `training` is the group of the run, for the keys that configure training.
    """
    mapping = registry.mapping_of(config)
    own: dict[str, Any] = {"torch_dtype": str(dtype).removeprefix("torch.")}
    weights = loss_weights.defaults(config) | {name: value for name, value in (training or {}).items() if value is not None}
    own |= {key: weights[name] for key, name in mapping.training_keys.items()}
    own |= {} if quantization is None else {"quantization_config": quantization}
    if original is not None:
        _write_json(folder / "config.json", original.config_json(mapping.config_json(config)) | own)
        if original.generation is not None:
            _write_json(folder / GENERATION_CONFIG, original.generation)
        return
    ids = {"bos_token_id": end_of_document_id, "eos_token_id": end_of_document_id}
    if mapping.constants.get("is_encoder_decoder"):
        padding = end_of_document_id if padding_id is None else padding_id
        ids |= {"pad_token_id": padding, "decoder_start_token_id": padding}
    _write_json(folder / "config.json", mapping.config_json(config) | ids | own)
    _write_json(folder / GENERATION_CONFIG, {"pad_token_id": end_of_document_id} | ids)


def copy_tokenizer(source: Path, folder: Path, *, end_of_document: str, max_positions: int) -> None:
    """Copy the tokenizer files; write tokenizer_config.json if the source has none."""
    copy_tokenizer_files(source, folder)
    if not (folder / "tokenizer_config.json").exists():
        content = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": end_of_document,
            "eos_token": end_of_document,
            "model_max_length": max_positions,
        }
        _write_json(folder / "tokenizer_config.json", content)


def write_chat_template(folder: Path, template: ChatTemplate) -> None:
    """Write the template of a fine-tuned model, and stop its completions at the token with which the template ends an answer.

    Args:
        folder: the export, with its tokenizer and its generation_config.json.
        template: of the fine-tuning.
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
