"""Registry of the model families: each function dispatches to the family of a configuration."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from pipeline.errors import UserError, Violation
from pipeline.layers.stack import Stack
from pipeline.models.adapter import Adapter, Row, refusal
from pipeline.models.families import FAMILIES, ModelConfig


def _part(config: ModelConfig, name: str) -> Any:
    """Import the module `name` of the family's folder."""
    return importlib.import_module(f"pipeline.models.{config.family}.{name}")


def build(config: ModelConfig) -> Stack:
    """Build the full model with uninitialized weights on torch's default device (meta included)."""
    return _part(config, "model").build(config)


def plan(config: ModelConfig) -> dict[str, str]:
    """Return the parallel plan: parameter name pattern (fnmatch) -> role (models/plan.py)."""
    return _part(config, "plan").PLAN


def aliases(config: ModelConfig) -> dict[str, str]:
    """Return the tied weights: name of a weight of the last pipeline stage -> name of the weight of the first stage it is tied to."""
    part = _part(config, "plan")
    if hasattr(part, "aliases"):
        return part.aliases(config)
    return getattr(part, "ALIASES", {"head.weight": "embed.tokens.weight"}) if config.tie_embeddings else {}


def everywhere(config: ModelConfig) -> tuple[str, ...]:
    """Return the patterns (fnmatch) of the weights that every pipeline stage holds."""
    return getattr(_part(config, "plan"), "EVERYWHERE", ())


def initial_std(config: ModelConfig, name: str) -> float | None:
    """Return the standard deviation of the normal initialization of weight `name`; None for constants (norms: ones, biases: zeros)."""
    return _part(config, "model").initial_std(config, name)


def adapters(family: str) -> tuple[Adapter, ...]:
    """Return the Hugging Face adapters of a family, one for each Hugging Face class."""
    module = importlib.import_module(f"pipeline.models.{family}.huggingface")
    found: tuple[Adapter, ...] = getattr(module, "ADAPTERS", None) or (module.ADAPTER,)
    return found


def adapter(config: ModelConfig) -> Adapter:
    """Return the adapter of the Hugging Face class that supports this configuration.

    Raises:
        UserError: no Hugging Face class supports the configuration.
    """
    found = adapters(config.family)
    wrong = {stock.architecture: stock.mismatches(config) for stock in found}
    for stock in found:
        if not wrong[stock.architecture]:
            return stock
    fix = "such a model cannot be exported to Hugging Face; train with the supported value to export it"
    raise UserError(
        [
            Violation(f"model.{field}", getattr(config, field), f"is not supported by {name}; only {value} is supported", fix)
            for name, values in wrong.items()
            for field, value in values.items()
        ]
    )


def stock_rows(config: ModelConfig) -> tuple[list[Row], dict[str, str]]:
    """Return the rows of the Hugging Face model in its order, without duplicates, and its names for duplicates: name -> stored tensor.

    Duplicates are tied weights (the head) and the `copies` of the adapter.
    """
    stock, tied = adapter(config), aliases(config)
    every = list(stock.rows(config))
    of_weight = {row.names: row.hf_name for row in every}
    copies = {row.hf_name: of_weight[(tied[row.names[0]],)] for row in every if row.names[0] in tied}
    own = [row for row in every if row.hf_name not in copies]
    named = {row.hf_name for row in own}
    return own, {**{copy: name for copy, name in stock.copies.items() if copy not in named}, **copies}


def find_adapter(content: Mapping[str, Any]) -> tuple[str, Adapter]:
    """Return the family and the adapter of a Hugging Face model.

    Args:
        content: content of its config.json.

    Raises:
        UserError: no family supports its class.
    """
    known = {family: adapters(family) for family in FAMILIES}
    named = (content.get("architectures") or [None])[0]
    for family, stock in ((family, stock) for family, found in known.items() for stock in found):
        if stock.model_type == content.get("model_type") and named in (stock.architecture, *stock.legacy_architectures):
            return family, stock
    classes = ", ".join(stock.architecture for found in known.values() for stock in found)
    key, value = ("architectures", named) if named else ("model_type", content.get("model_type"))
    raise refusal(key, value, "is not a class that can be imported", f"choose a model of one of {classes}")
