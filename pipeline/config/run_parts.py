"""Parts of a RunConfig, which implements them: a function that takes one says which groups it reads."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Protocol

from pipeline.config.cluster import ClusterConfig
from pipeline.config.lora import LoraConfig, is_adapter
from pipeline.config.parallel import ParallelConfig
from pipeline.config.schema import PrecisionConfig
from pipeline.config.training import TrainingConfig
from pipeline.models.config import ModelConfig


class WeightsConfig(Protocol):
    """Which weights a model has, and which of them are trained."""

    @property
    def model(self) -> ModelConfig:
        """The model without adapters."""

    @property
    def lora(self) -> LoraConfig:
        """Its adapters."""

    @property
    def training(self) -> TrainingConfig:
        """Weights that are not trained, or rounded."""


class LayoutConfig(Protocol):
    """How the model, sequences and batches are distributed over ranks."""

    @property
    def model(self) -> ModelConfig:
        """The model, whose blocks the pipeline stages share."""

    @property
    def parallel(self) -> ParallelConfig:
        """Sizes of the axes, and the pipeline schedule."""

    @property
    def cluster(self) -> ClusterConfig:
        """Ranks of a node, over which ZeRO may shard."""

    @property
    def training(self) -> TrainingConfig:
        """Batch size and sequence length."""


class LocalModelConfig(LayoutConfig, WeightsConfig, Protocol):
    """A rank's part of the model: its weights, where they are, and how they are computed."""

    @property
    def precision(self) -> PrecisionConfig:
        """Number formats of the weights and of matrix products."""


def is_frozen(config: WeightsConfig, name: str) -> bool:
    """Whether training leaves a weight as it is; with LoRA, all but adapters, lora.modules_to_save and the head of a classifier."""
    is_head = bool(getattr(config.model, "labels", [])) and name.startswith("head.")
    if config.lora.rank and not (is_adapter(name) or is_head or config.lora.saves(name)):
        return True
    return any(fnmatchcase(name, pattern) for pattern in config.training.frozen)
