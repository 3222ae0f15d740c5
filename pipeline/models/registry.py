"""Where the parts of a family live: each function finds the family's own by the configuration's name."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from pipeline.errors import UserError, Violation
from pipeline.layers.stack import Stack
from pipeline.models.adapter import Adapter, Row, refusal
from pipeline.models.config import ModelConfig
from pipeline.models.families import FAMILIES


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
    part = _part(config, "plan")
    if hasattr(part, "aliases"):
        return part.aliases(config)
    return getattr(part, "ALIASES", {"head.weight": "embed.tokens.weight"}) if config.tie_embeddings else {}


def everywhere(config: ModelConfig) -> tuple[str, ...]:
    """Patterns of the weights that every pipeline stage holds."""
    return getattr(_part(config, "plan"), "EVERYWHERE", ())


def initial_std(config: ModelConfig, name: str) -> float | None:
    """Standard deviation of the initial normal values of weight `name`; None for constants (ones for norms, zeros for biases)."""
    return _part(config, "model").initial_std(config, name)


def adapters(family: str) -> tuple[Adapter, ...]:
    """The family's Hugging Face adapters: configuration and weight names of each stock class that it has."""
    module = importlib.import_module(f"pipeline.models.{family}.huggingface")
    found: tuple[Adapter, ...] = getattr(module, "ADAPTERS", None) or (module.ADAPTER,)
    return found


def adapter(config: ModelConfig) -> Adapter:
    """The adapter of the stock class for this configuration.

    Raises:
        UserError: no stock class has what the configuration asks for.
    """
    found = adapters(config.family)
    wrong = {stock.architecture: stock.differences(config) for stock in found}
    for stock in found:
        if not wrong[stock.architecture]:
            return stock
    fix = "there is no Hugging Face folder of such a model; train with the stock class's value to have one"
    raise UserError(
        [
            Violation(f"model.{ours}", getattr(config, ours), f"is nothing {name} has; {value} is all it knows", fix)
            for name, values in wrong.items()
            for ours, value in values.items()
        ]
    )


def stock_rows(config: ModelConfig) -> tuple[list[Row], dict[str, str]]:
    """The stock model's tensors, in its order, and its names for what is another tensor once more (a tied head): name -> that other's."""
    stock, tied = adapter(config), aliases(config)
    every = list(stock.rows(config))
    of_weight = {row.ours: row.theirs for row in every}
    copies = {row.theirs: of_weight[(tied[row.ours[0]],)] for row in every if row.ours[0] in tied}
    own = [row for row in every if row.theirs not in copies]
    named = {row.theirs for row in own}
    return own, {**{copy: name for copy, name in stock.copies.items() if copy not in named}, **copies}


def adapter_of(content: Mapping[str, Any]) -> tuple[str, Adapter]:
    """The family and the adapter of a stock model.

    Args:
        content: of its config.json.

    Raises:
        UserError: no family has its class.
    """
    known = {family: adapters(family) for family in FAMILIES}
    named = (content.get("architectures") or [None])[0]
    for family, stock in ((family, stock) for family, found in known.items() for stock in found):
        if stock.model_type == content.get("model_type") and named in (stock.architecture, *stock.older):
            return family, stock
    classes = ", ".join(stock.architecture for found in known.values() for stock in found)
    key, value = ("architectures", named) if named else ("model_type", content.get("model_type"))
    raise refusal(key, value, "is no class that can be imported", f"choose a model of {classes}")
