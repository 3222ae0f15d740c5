"""Weights of the losses that some families add to their own, and the speed of routers' biases, as functions of the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config.schema import RunConfig
from pipeline.config.training import TrainingConfig

#: Settings of the group training; a schedule of each is training.NAME_schedule.
NAMES = ("balance_loss", "z_loss", "bias_update_speed", "mtp_loss")


def defaults(model: Any) -> dict[str, float]:
    """Return the settings that a model has, with the defaults of its family; empty for most families."""
    weights: dict[str, float] = getattr(model, "loss_weights", {})
    return weights


def inherited(config: RunConfig, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a run leaves open, with their values in the run or the imported model that it starts from.

    Args:
        recorded: the group training of the checkpoint that it starts from.
    """
    names = [name for name in defaults(config.model) if getattr(config.training, name) is None]
    return {name: recorded[name] for name in names if recorded.get(name) is not None}


def at(model: Any, training: TrainingConfig, step: int) -> dict[str, float]:
    """Return the settings that the model has at a step (counted from 0)."""
    weights = {}
    for name, default in defaults(model).items():
        chosen = default if getattr(training, name) is None else getattr(training, name)
        weights[name] = next((entry.value for entry in getattr(training, f"{name}_schedule") if step < entry.until_step), chosen)
    return weights


def text(model: Any, training: TrainingConfig, name: str) -> str:
    """Return the values of a setting over the run, such as "0.001 until step 1000, then 0"."""
    schedule = getattr(training, f"{name}_schedule")
    parts = [f"{entry.value:g} until step {entry.until_step}" for entry in schedule]
    last = max((entry.until_step for entry in schedule), default=0)
    return ", then ".join([*parts, f"{at(model, training, last)[name]:g}"])
