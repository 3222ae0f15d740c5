"""The Hugging Face model that a run started from: its configuration and special tokens, which an export keeps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.conversion.huggingface_import import read_config, read_generation_config
from pipeline.data.tokenize.tokenizer import TextEncoder
from pipeline.models import config_json, registry, stock_keys

#: Keys of an imported config.json that are not exported: about its files, or about code of its repository.
_OF_THE_FILES = frozenset(("torch_dtype", "dtype", "quantization_config", "auto_map"))

#: Sizes of a model that has grown: of its config.json only the tokens remain, as other keys may be lists with an entry for each block.
_GROWN, _TOKENS = ("num_hidden_layers", "num_experts", "num_local_experts"), ("bos_token_id", "eos_token_id", "pad_token_id")


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
        if not changed.isdisjoint(_GROWN):
            return {key: self.content[key] for key in _TOKENS if key in self.content} | exported
        changed |= {key for group in self.groups if not changed.isdisjoint(group) for key in group}
        stale = {alias for alias, key in self.aliases.items() if key in changed}
        stale |= {"num_labels", "problem_type"} if "id2label" in changed else set()  # of the labels before
        kept = {key: value for key, value in self.content.items() if key not in _OF_THE_FILES | changed | stale}
        return kept | {key: value for key, value in exported.items() if key in changed or key in ("architectures", "model_type")}


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


def token_ids(original: Original | None, encoder: TextEncoder) -> TokenIds:
    """Return the tokens that an export of a decoder names: those of the imported model, or the end-of-document token for all."""
    end = encoder.end_of_document
    if original is None:
        return TokenIds(end if encoder.bos is None else encoder.bos, [end], end)
    pad = original.token_id("pad_token_id")
    return TokenIds(original.token_id("bos_token_id"), original.ends or [end], pad if isinstance(pad, int) and pad >= 0 else None)


def read_original(folder: Path) -> Original:
    """Read an imported model, from the folder with its config.json."""
    content = read_config(folder)
    family, mapping = registry.find_mapping(content)
    content = mapping.language_model(content)
    mapped = mapping.config_json(config_json.read(mapping, family.config, content))
    stock = stock_keys.keys_of(mapping.architecture)
    groups = tuple(group.keys for group in mapping.nested)
    return Original(content, read_generation_config(folder), mapped, groups, {} if stock is None else stock.aliases)
