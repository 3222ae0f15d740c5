"""Registry of the model families: each function dispatches to the family of a configuration."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from pipeline.common.errors import UserError, Violation
from pipeline.layers.init import Init
from pipeline.layers.stack import Stack
from pipeline.models.adapter import Adapter, Row, refusal
from pipeline.models.config import ModelConfig
from pipeline.models.families import FAMILIES


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


def initial_std(config: ModelConfig, name: str) -> Init:
    """Return the standard deviation of the initial values of weight `name`, or another Init (layers/init.py)."""
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
    candidates = adapters(config.family)
    mismatches = {candidate.architecture: candidate.mismatches(config) for candidate in candidates}
    for candidate in candidates:
        if not mismatches[candidate.architecture]:
            return candidate
    fix = "such a model cannot be exported to Hugging Face; train with the supported value to export it"
    raise UserError(
        [
            Violation(f"model.{field}", getattr(config, field), f"is not supported by {name}; only {value} is supported", fix)
            for name, values in mismatches.items()
            for field, value in values.items()
        ]
    )


def stock_rows(config: ModelConfig) -> tuple[list[Row], dict[str, str]]:
    """Return the rows of the Hugging Face model in its order, without duplicates, and its names for duplicates: name -> stored tensor.

    Duplicates are tied weights (the head) and the `copies` of the adapter.
    """
    table, tied = adapter(config), aliases(config)
    all_rows = list(table.rows(config))
    hf_names = {row.names: row.hf_name for row in all_rows if row.names}
    duplicates = {row.hf_name: hf_names[(tied[row.names[0]],)] for row in all_rows if row.names and row.names[0] in tied}
    stored = [row for row in all_rows if row.hf_name not in duplicates]
    stored_names = {row.hf_name for row in stored}
    return stored, {**{copy: name for copy, name in table.copies.items() if copy not in stored_names}, **duplicates}


def find_adapter(content: Mapping[str, Any]) -> tuple[str, Adapter]:
    """Return the family and the adapter of a Hugging Face model.

    Args:
        content: content of its config.json.

    Raises:
        UserError: no family supports its class.
    """
    candidates = [(family, candidate) for family in FAMILIES for candidate in adapters(family)]
    names = content.get("architectures")
    if names is not None and not (isinstance(names, list) and names and isinstance(names[0], str)):
        raise refusal("architectures", names, "must be a list with the name of a class", 'set it, such as ["LlamaForCausalLM"]')
    architecture = names[0] if names else None
    for family, candidate in candidates:
        if candidate.model_type == content.get("model_type") and architecture in (candidate.architecture, *candidate.legacy_architectures):
            return family, candidate
    classes = ", ".join(candidate.architecture for _, candidate in candidates)
    key, value = ("architectures", architecture) if architecture else ("model_type", content.get("model_type"))
    raise refusal(key, value, "is not a class that can be imported", f"choose a model of one of {classes}")
