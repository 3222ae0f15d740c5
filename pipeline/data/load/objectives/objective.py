"""The face of an objective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import numpy as np

from pipeline.config.schema import RunConfig
from pipeline.data.load.loader import Samples, Source

#: A target that counts for nothing, as layers/loss.py has it, which loads torch.
IGNORE = -100


class Objective(ABC):
    """Makes a model's inputs and targets of samples of text.

    What it makes of sample i depends on (seed, i) alone: not on the ranks, the batch or what was made before.

    Attributes:
        samples: the text, or what else samples are made of.
        decoder_length: tokens that a decoder reads beside the encoder's, 0 without one.
        bytes_per_token: UTF-8 bytes of text per target, for bits per byte; None where the loss does not measure all of the text.
    """

    samples: Source
    decoder_length: int = 0
    bytes_per_token: float | None = None

    @staticmethod
    @abstractmethod
    def text_length(config: RunConfig) -> int:
        """Tokens of text from one sample to the next; `of` is given samples with one token more."""

    @classmethod
    @abstractmethod
    def of(cls, config: RunConfig, samples: Samples) -> Self:
        """The objective of a run.

        Raises:
            UserError: tokenizer or data do not have what it needs.
        """

    @abstractmethod
    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The inputs and targets of samples.

        Args:
            indices: (n,) the samples' numbers.

        Returns:
            "tokens" and what else a Batch (layers/batch.py) has for this objective, each with n rows, in any integer type.
        """
