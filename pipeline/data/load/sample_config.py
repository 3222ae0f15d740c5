"""The part of a run's configuration that its samples depend on."""

from __future__ import annotations

from typing import Protocol

from pipeline.config.data import DataConfig, TokenizerConfig
from pipeline.config.parallel import ParallelConfig
from pipeline.config.training import TrainingConfig
from pipeline.models.config import ModelConfig


class SampleConfig(Protocol):
    """What data and objectives read of a RunConfig, which implements it."""

    @property
    def run_dir(self) -> str:
        """The run directory, which gets the list of unusable lines."""

    @property
    def data(self) -> DataConfig:
        """Corpora, blend, packing, and the settings of each objective."""

    @property
    def tokenizer(self) -> TokenizerConfig:
        """The tokenizer that the data was tokenized with."""

    @property
    def training(self) -> TrainingConfig:
        """Sequence length, batch size, seed, document mask."""

    @property
    def model(self) -> ModelConfig:
        """Its objective, vocabulary, labels and segments."""

    @property
    def parallel(self) -> ParallelConfig:
        """Sequence parallelism, which divides the decoder's input evenly."""

    @property
    def objective(self) -> str:
        """Name of the training objective."""
