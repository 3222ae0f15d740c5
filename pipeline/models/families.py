"""The families' names and configurations. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.models.gpt.config import GPTConfig
from pipeline.models.llama.config import LlamaConfig

ModelConfig = GPTConfig | LlamaConfig

#: family -> its configuration dataclass
FAMILIES: dict[str, type[Any]] = {"gpt": GPTConfig, "llama": LlamaConfig}


def from_dict(values: Mapping[str, Any]) -> ModelConfig:
    """The model's configuration, from what a checkpoint or a run directory wrote of it."""
    return FAMILIES[values["family"]](**values)
