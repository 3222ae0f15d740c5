"""Hugging Face classes whose model contains that of another class, beside encoders of images: the language model alone is imported."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from pipeline.models.stock_keys import INERT

#: Key of config.json with the configuration of the language model.
TEXT = "text_config"
#: Keys that classes write beside it, and that are about the file, its dtype and the tokens that begin and end a text.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OF_THE_FILE = ("architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache", "auto_map")


@dataclass(frozen=True)
class Wrapper:
    """Such a class.

    Attributes:
        architecture: its name.
        model_type: model_type of its config.json.
        constants: key beside `text_config` -> the only value that is supported, also the default. The language model has it too.
        replaced: key beside `text_config` -> its default; it takes the place of the language model's own key, as in the class.
        ignored_keys: keys about the other parts of the model.
        left_out: patterns (fnmatch) of the tensors of these parts.
        renamed: as in HuggingFaceMapping: current and earlier names of the tensors of the language model.
    """

    architecture: str
    model_type: str
    constants: dict[str, Any] = field(default_factory=dict)
    replaced: dict[str, Any] = field(default_factory=dict)
    ignored_keys: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = (
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^(?:model\.)?language_model\.(?:model\.)?", "model."),
    )

    def problems(self, content: dict[str, Any], inner_type: str) -> Iterator[tuple[str, Any, str]]:
        """Yield (key, value, rule) of the keys of config.json that may change what the language model computes.

        Args:
            inner_type: model_type of the language model.
        """
        inner = content.get(TEXT)
        if not isinstance(inner, dict):
            yield TEXT, inner, "must be the configuration of the language model"
        elif inner.get("model_type", inner_type) != inner_type:
            yield f"{TEXT}.model_type", inner["model_type"], f"must be {inner_type}"
        for key, expected in self.constants.items():
            if content.get(key, expected) != expected:
                yield key, content[key], f"is not supported; only {expected} is supported"
        known = {TEXT, *_TOKENS, *_OF_THE_FILE, *self.constants, *self.replaced, *self.ignored_keys, *INERT}
        for key in sorted(content.keys() - known):
            if content[key] is not None:
                yield key, content[key], f"is not known beside {TEXT} of {self.architecture}"

    def language_model(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration of the language model; tokens and further keys are those beside it, as in the class."""
        beside = {key: content[key] for key in (*_TOKENS, "transformers_version") if key in content}
        beside |= {key: content.get(key, default) for key, default in self.replaced.items()}
        return {**content[TEXT], **beside, **self.constants}

    def is_left_out(self, name: str) -> bool:
        """Whether a tensor belongs to another part of the model."""
        return any(fnmatchcase(name, pattern) for pattern in self.left_out)

    def summary(self, names: list[str]) -> str:
        """Return a line for the log: what is imported, and the parts of the model whose tensors (`names`) are left out."""
        parts = Counter(re.sub(r"^((?:model\.)?\w+)\..*", r"\1", name) for name in names)
        counts = ", ".join(f"{count} of {part}" for part, count in sorted(parts.items())) or "none"
        return f"imported is the language model of {self.architecture}; the tensors of its other parts are left out: {counts}"
