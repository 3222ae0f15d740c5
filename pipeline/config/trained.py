"""Which weights a run trains."""

from __future__ import annotations

from fnmatch import fnmatchcase

from pipeline.config.lora import is_adapter
from pipeline.config.run_parts import WeightsConfig


def is_frozen(config: WeightsConfig, name: str) -> bool:
    """Whether training leaves a weight as it is; with LoRA, all but adapters, lora.modules_to_save and the head of a classifier."""
    is_head = bool(getattr(config.model, "labels", [])) and name.startswith("head.")
    if config.lora.rank and not (is_adapter(name) or is_head or config.lora.saves(name)):
        return True
    return any(fnmatchcase(name, pattern) for pattern in config.training.frozen)
