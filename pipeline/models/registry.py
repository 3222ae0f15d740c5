"""Family names and where their parts live. Importing this loads no torch; build() and its peers do."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipeline.models.gpt.config import GPTConfig
from pipeline.models.llama.config import LlamaConfig

if TYPE_CHECKING:
    from pipeline.layers.decoder import Decoder
    from pipeline.models.adapter import Adapter

ModelConfig = GPTConfig | LlamaConfig

#: family -> its configuration dataclass
FAMILIES: dict[str, type[Any]] = {"gpt": GPTConfig, "llama": LlamaConfig}


def _part(config: ModelConfig, name: str) -> Any:
    """The module `name` of the family's folder."""
    return importlib.import_module(f"pipeline.models.{config.family}.{name}")


def from_dict(values: Mapping[str, Any]) -> ModelConfig:
    """The model's configuration, from what a checkpoint or a run directory wrote of it."""
    return FAMILIES[values["family"]](**values)


def build(config: ModelConfig) -> Decoder:
    """The whole model with uninitialised weights on torch's current default device (meta included)."""
    return _part(config, "model").build(config)


def plan(config: ModelConfig) -> dict[str, str]:
    """The parallel plan: parameter name pattern (fnmatch) -> column | row | vocab | replicate."""
    return _part(config, "plan").PLAN


def initial_std(config: ModelConfig, name: str) -> float | None:
    """Standard deviation of the initial normal values of weight `name`; None for constants (ones for norms, zeros for biases)."""
    return _part(config, "model").initial_std(config, name)


def adapter(config: ModelConfig) -> Adapter:
    """The family's Hugging Face adapter: configuration and weight names of the stock class."""
    return _part(config, "huggingface").ADAPTER
