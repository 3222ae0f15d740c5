"""Rotary positions of a family: its knobs, and their keys in config.json. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.errors import Violation
from pipeline.knobs import knob

#: our kind -> stock rope_type -> our fields by their keys
KEYS: dict[str, dict[str, str]] = {
    "none": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor",
        "original_max_position_embeddings": "rope_original_positions",
        "low_freq_factor": "rope_low_frequency",
        "high_freq_factor": "rope_high_frequency",
    },
    "yarn": {
        "factor": "rope_factor",
        "original_max_position_embeddings": "rope_original_positions",
        "beta_slow": "rope_beta_slow",
        "beta_fast": "rope_beta_fast",
        "mscale": "rope_mscale",
        "mscale_all_dim": "rope_mscale_all",
        "attention_factor": "rope_attention_factor",
    },
}


@dataclass
class RopeConfig:
    """Knobs of a family with rotary positions, some of which only one way of scaling reads."""

    rope_theta: float = knob(10000.0, "base of the rotary wave lengths", above=1)
    rope_scaling: str = knob("none", "how wave lengths are stretched beyond the first training's", choices=tuple(KEYS))
    rope_factor: float = knob(1.0, "how far: longest sequence over that of the first training", at_least=1)
    rope_original_positions: int = knob(4096, "llama3, yarn: longest sequence of the first training", unit="tokens", at_least=1)
    rope_low_frequency: float = knob(1.0, "llama3: waves with fewer turns over the first length are stretched whole", above=0)
    rope_high_frequency: float = knob(4.0, "llama3: waves with more turns over the first length are left alone", above=0)
    rope_beta_slow: float = knob(1.0, "yarn: as rope_low_frequency", above=0)
    rope_beta_fast: float = knob(32.0, "yarn: as rope_high_frequency", above=0)
    rope_mscale: float = knob(0.0, "yarn: growth of the tables with the factor, where rope_mscale_all is set too", at_least=0)
    rope_mscale_all: float = knob(0.0, "yarn: growth of all dims of queries and keys (DeepSeek)", at_least=0)
    rope_attention_factor: float | None = knob(None, "yarn: of the tables, instead of what follows from the factor", above=0)


def violations(config: RopeConfig) -> Iterator[Violation]:
    """Rules between these knobs."""
    for kind, low, high in (("llama3", "rope_low_frequency", "rope_high_frequency"), ("yarn", "rope_beta_slow", "rope_beta_fast")):
        if config.rope_scaling == kind and getattr(config, low) >= getattr(config, high):
            yield Violation(
                f"model.{low}", getattr(config, low), f"must be below model.{high}={getattr(config, high)}", f"choose a smaller {low}"
            )


def scaling(config: RopeConfig) -> dict[str, Any]:
    """The knobs as arguments of layers.rope_scaling.Scaling."""
    fields = {ours: getattr(config, ours) for ours in KEYS[config.rope_scaling].values()}
    return {"kind": config.rope_scaling, **{name.removeprefix("rope_"): value for name, value in fields.items()}}
