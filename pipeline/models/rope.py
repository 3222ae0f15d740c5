"""Configuration of rotary position embeddings and its keys in config.json. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pipeline.common.errors import UserError, Violation
from pipeline.common.knobs import knob
from pipeline.models.config import ModelConfig, Sizes

#: model.rope_scaling (rope_type of config.json) -> key of config.json's rope parameters -> our field
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
        "truncate": "rope_truncate",
    },
}


@dataclass(frozen=True)
class RopeConfig(Sizes):
    """Fields of a family with rotary position embeddings and RoPE scaling; some apply to one kind of scaling only."""

    rope_theta: float = knob(10000.0, "base of the rotary frequencies", above=1)
    rope_scaling: str = knob("none", "RoPE scaling for sequences longer than the original context length", choices=tuple(KEYS))
    rope_factor: float = knob(1.0, "longest sequence over the original context length", at_least=1)
    rope_original_positions: int = knob(4096, "llama3, yarn: original context length", unit="tokens", at_least=1)
    rope_low_frequency: float = knob(
        1.0, "llama3: frequencies with fewer rotations over the original context are divided by the factor", above=0
    )
    rope_high_frequency: float = knob(4.0, "llama3: frequencies with more rotations over the original context are unchanged", above=0)
    rope_beta_slow: float = knob(1.0, "yarn: as rope_low_frequency (config.json: beta_slow)", above=0)
    rope_beta_fast: float = knob(32.0, "yarn: as rope_high_frequency (config.json: beta_fast)", above=0)
    rope_mscale: float = knob(0.0, "yarn: growth of the cos and sin tables with the factor, if rope_mscale_all is set too", at_least=0)
    rope_mscale_all: float = knob(0.0, "yarn: growth of the softmax scale with the factor (DeepSeek)", at_least=0)
    rope_attention_factor: float | None = knob(None, "yarn: factor of the cos and sin tables; null derives it from rope_factor", above=0)
    rope_truncate: bool = knob(True, "yarn: round the ends of the ramp of frequencies outward to whole dimensions (config.json: truncate)")

    def violations(self) -> list[Violation]:
        """See Sizes."""
        violations = []
        low, high = self.rope_low_frequency, self.rope_high_frequency
        if self.rope_scaling == "llama3" and low >= high:
            rule = f"must be below model.rope_high_frequency={high}"
            violations.append(Violation("model.rope_low_frequency", low, rule, "choose a smaller one"))
        slow, fast = self.rope_beta_slow, self.rope_beta_fast
        if self.rope_scaling == "yarn" and slow > fast:  # equal in Kimi K2: the ends of the ramp are rounded outward
            rule = f"must be at most model.rope_beta_fast={fast}"
            violations.append(Violation("model.rope_beta_slow", slow, rule, "choose a smaller one"))
        return [*violations, *super().violations()]


def extended(config: ModelConfig, factor: float) -> ModelConfig:
    """Return the configuration for sequences that are longer by a factor: positions are interpolated (rope_scaling=linear).

    Raises:
        UserError: the model has no rotary positions that can be interpolated.
    """
    if factor == 1:
        return config
    if not isinstance(config, RopeConfig) or config.rope_scaling not in ("none", "linear"):
        rope = f"model.rope_scaling={config.rope_scaling}" if isinstance(config, RopeConfig) else "no model.rope_scaling"
        rule = f"interpolates rotary positions, and the model (family {config.family}) has {rope}"
        raise UserError.of("training.context_factor", factor, rule, "set it to 1, or choose a model with rope_scaling none or linear")
    positions = int(config.max_positions * factor)
    return replace(config, rope_scaling="linear", rope_factor=config.rope_factor * factor, max_positions=positions)  # type: ignore[call-arg]


def scaling(config: RopeConfig) -> dict[str, Any]:
    """Return the fields as arguments of layers.rope_scaling.RopeScaling."""
    fields = {name: getattr(config, name) for name in KEYS[config.rope_scaling].values()}
    return {"kind": config.rope_scaling, **{name.removeprefix("rope_"): value for name, value in fields.items()}}
