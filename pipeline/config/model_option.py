"""Command-line overrides that describe a model configuration."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from pipeline.config.paths import CONF_DIR
from pipeline.models.config import ModelConfig
from pipeline.models.config_classes import CONFIG_CLASSES


def overrides(model: ModelConfig) -> list[str]:
    """Return `model=NAME` of the closest model in conf/model, and `model.KEY=VALUE` for every difference."""
    values = dataclasses.asdict(model)
    differences = {
        name: {key: value for key, value in values.items() if dataclasses.asdict(shipped)[key] != value}
        for name, shipped in _shipped(model.family)
    }
    name = min(differences, key=lambda name: (len(differences[name]), name))
    return [f"model={name}", *(f"model.{key}={_format(value)}" for key, value in differences[name].items())]


def _shipped(family: str) -> Iterator[tuple[str, ModelConfig]]:
    """Yield (name, configuration) of all models of a family in conf/model."""
    for file in sorted((CONF_DIR / "model").glob("*.yaml")):
        values: Any = OmegaConf.to_container(OmegaConf.load(file))
        bases = values.pop("defaults")
        if re.fullmatch(rf"/schema/model/{family}@_here_", bases[0]) and bases[1:] == ["_self_"]:
            yield file.stem, CONFIG_CLASSES[family](**values)


def _format(value: Any) -> str:
    """Format a value in Hydra syntax."""
    return str(value) if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
