"""Exports a checkpoint as a Hugging Face folder that stock `transformers` loads, with one output shard in memory at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
from pipeline.models import config_json, registry
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


@dataclass(frozen=True)
class Original:
    """What an export keeps of the Hugging Face model that the run started from.

    Attributes:
        content: the keys of its config.json with token ids, and those that its class does not read.
        generation: the content of its generation_config.json, None without one.
    """

    content: dict[str, Any]
    generation: dict[str, Any] | None


def read_original(folder: Path) -> Original:
    """Read what an export keeps of an imported model, from the folder with its config.json."""
    content = read_config(folder)
    _, mapping = registry.find_mapping(content)
    token_ids = {key: value for key, value in content.items() if key.endswith(("_token_id", "_token_ids"))}
    return Original(config_json.unread(mapping, content) | token_ids, read_generation_config(folder))


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
    token if there is one. A model that started from a Hugging Face model keeps its token ids and its generation_config.json, if any.
    `quantization` becomes the key quantization_config. `training` is the group of the run, for the keys that configure training.
    """
    mapping = registry.mapping_of(config)
    own: dict[str, Any] = {"torch_dtype": str(dtype).removeprefix("torch.")}
    weights = loss_weights.defaults(config) | {name: value for name, value in (training or {}).items() if value is not None}
    own |= {key: weights[name] for key, name in mapping.training_keys.items()}
    own |= {} if quantization is None else {"quantization_config": quantization}
    if original is not None:
        _write_json(folder / "config.json", mapping.config_json(config) | original.content | own)
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
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if not (folder / "tokenizer_config.json").exists():
        content = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": end_of_document,
            "eos_token": end_of_document,
            "model_max_length": max_positions,
        }
        _write_json(folder / "tokenizer_config.json", content)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
