"""Causal language modeling with overlapping windows: the perplexity of a text of which every token has a context of some length."""

from __future__ import annotations

from typing import Self

import numpy as np

from pipeline.data.load import blend
from pipeline.data.load.objectives.causal import Causal
from pipeline.data.load.objectives.objective import IGNORE
from pipeline.data.load.sample_config import SampleConfig
from pipeline.data.load.samples import Samples


class Sliding(Causal):
    """Windows that begin stage.stride tokens after one another; for evaluation.

    Only the last stage.stride tokens of a window are targets, so that each has a context of at least sequence_length - stride tokens; all
    tokens of the first window are.
    """

    stride: int

    @classmethod
    def open_windows(cls, config: SampleConfig, share: tuple[int, int], stride: int) -> Self | None:
        """Open the validation data as Objective.open_validation does, with windows `stride` tokens apart."""
        samples = blend.open_validation(config, share, stride=stride)
        return None if samples is None else cls.with_stride(config, samples, stride)

    @classmethod
    def open_windows_of_corpora(cls, config: SampleConfig, share: tuple[int, int], stride: int) -> dict[str, Self | None]:
        """Open each corpus as Objective.open_validation_corpora does, with windows `stride` tokens apart."""
        corpora = blend.open_validation_corpora(config, share, stride=stride)
        return {name: None if samples is None else cls.with_stride(config, samples, stride) for name, samples in corpora.items()}

    @classmethod
    def with_stride(cls, config: SampleConfig, samples: Samples, stride: int) -> Self:
        """Return the objective over windows `stride` tokens apart."""
        objective = cls.of(config, samples)
        objective.stride = stride
        return objective

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: as Causal, with the targets of a window's last tokens."""
        arrays = super().arrays(indices)
        targets = arrays["targets"].astype(np.int32)
        targets[np.asarray(indices) > 0, : targets.shape[1] - self.stride] = IGNORE
        return {**arrays, "targets": targets}
