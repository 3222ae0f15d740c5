"""Causal language modeling with overlapping windows: the perplexity of a text of which every token has a context of some length."""

from __future__ import annotations

from typing import Self

import numpy as np

from pipeline.config.schema import RunConfig
from pipeline.config.stages import Evaluate
from pipeline.data.load import blend
from pipeline.data.load.objectives.causal import Causal
from pipeline.data.load.objectives.objective import IGNORE
from pipeline.data.load.samples import Samples


class Sliding(Causal):
    """Windows that begin stage.stride tokens after one another; for evaluation.

    Only the last stage.stride tokens of a window are targets, so that each has a context of at least sequence_length - stride tokens; all
    tokens of the first window are.
    """

    stride: int

    @classmethod
    def open_validation(cls, config: RunConfig, share: tuple[int, int] = (0, 1)) -> Self | None:
        """See Objective."""
        samples = blend.open_validation(config, share, stride=_stride(config))
        return cls.of(config, samples) if samples is not None else None

    @classmethod
    def open_validation_corpora(cls, config: RunConfig, share: tuple[int, int] = (0, 1)) -> dict[str, Self | None]:
        """See Objective."""
        corpora = blend.open_validation_corpora(config, share, stride=_stride(config))
        return {name: None if samples is None else cls.of(config, samples) for name, samples in corpora.items()}

    @classmethod
    def of(cls, config: RunConfig, samples: Samples) -> Self:
        """See TokenShardObjective."""
        found = super().of(config, samples)
        found.stride = _stride(config)
        return found

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: as Causal, with the targets of a window's last tokens."""
        found = super().arrays(indices)
        targets = found["targets"].astype(np.int32)
        targets[np.asarray(indices) > 0, : targets.shape[1] - self.stride] = IGNORE
        return {**found, "targets": targets}


def _stride(config: RunConfig) -> int:
    """The distance of two windows."""
    assert isinstance(config.stage, Evaluate)
    assert config.stage.stride is not None
    return config.stage.stride
