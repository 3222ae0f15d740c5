"""Where the parts of a family live: each function finds the family's own by the configuration's name."""

from __future__ import annotations

import importlib
from typing import Any

from pipeline.layers.stack import Stack
from pipeline.models.adapter import Adapter
from pipeline.models.families import ModelConfig


def _part(config: ModelConfig, name: str) -> Any:
    """The module `name` of the family's folder."""
    return importlib.import_module(f"pipeline.models.{config.family}.{name}")


def build(config: ModelConfig) -> Stack:
    """The whole model with uninitialised weights on torch's current default device (meta included)."""
    return _part(config, "model").build(config)


def plan(config: ModelConfig) -> dict[str, str]:
    """The parallel plan: parameter name pattern (fnmatch) -> role (models/plan.py)."""
    return _part(config, "plan").PLAN


def aliases(config: ModelConfig) -> dict[str, str]:
    """Weights of the last stage that are one of the first stage's: their name -> its name."""
    return getattr(_part(config, "plan"), "ALIASES", {"head.weight": "embed.tokens.weight"}) if config.tie_embeddings else {}


def everywhere(config: ModelConfig) -> tuple[str, ...]:
    """Patterns of the weights that every pipeline stage holds."""
    return getattr(_part(config, "plan"), "EVERYWHERE", ())


def initial_std(config: ModelConfig, name: str) -> float | None:
    """Standard deviation of the initial normal values of weight `name`; None for constants (ones for norms, zeros for biases)."""
    return _part(config, "model").initial_std(config, name)


def adapter(config: ModelConfig) -> Adapter:
    """The family's Hugging Face adapter: configuration and weight names of the stock class."""
    return _part(config, "huggingface").ADAPTER
