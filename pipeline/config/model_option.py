"""A model's configuration as words of a command line."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf

from pipeline.config.paths import CONF_DIR
from pipeline.models.families import FAMILIES, ModelConfig


def overrides(model: ModelConfig) -> list[str]:
    """`model=NAME` of the nearest shipped model, and `model.KEY=VALUE` for what differs from it."""
    wanted = dataclasses.asdict(model)
    found = {
        name: {key: value for key, value in wanted.items() if dataclasses.asdict(shipped)[key] != value}
        for name, shipped in _shipped(model.family)
    }
    name = min(found, key=lambda name: (len(found[name]), name))
    return [f"model={name}", *(f"model.{key}={_word(value)}" for key, value in found[name].items())]


def _shipped(family: str) -> Iterator[tuple[str, ModelConfig]]:
    """The family's models in conf/model."""
    for file in sorted((CONF_DIR / "model").glob("*.yaml")):
        values: Any = OmegaConf.to_container(OmegaConf.load(file))
        bases = values.pop("defaults")
        if re.fullmatch(rf"/schema/model/{family}@_here_", bases[0]) and bases[1:] == ["_self_"]:
            yield file.stem, FAMILIES[family](**values)


def _word(value: Any) -> str:
    """A value as Hydra reads it."""
    return str(value) if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
