"""Causal language modeling: predict the next token from all tokens before it."""

from __future__ import annotations

from typing import Self

import numpy as np

from pipeline.data.load.document_boundaries import document_ids
from pipeline.data.load.objectives.objective import IGNORE, TokenShardObjective
from pipeline.data.load.sample_config import SampleConfig
from pipeline.data.load.samples import Samples
from pipeline.data.load.validation_split import ValidationSamples


class Causal(TokenShardObjective):
    """The target of each position is the next token."""

    def __init__(self, samples: Samples, *, document_mask: bool = False, padded: bool = False) -> None:
        """Use samples of sequence_length + 1 tokens.

        Args:
            samples: the text.
            document_mask: return document numbers, for attention within documents.
            padded: samples are packed documents followed by end-of-document tokens, which get no targets.
        """
        self.samples, self._document_mask, self._padded = samples, document_mask, padded

    @staticmethod
    def every_position_counts(config: SampleConfig) -> bool:
        """See Objective: packed documents are padded."""
        return config.data.packing == "windows"

    @staticmethod
    def text_length(config: SampleConfig) -> int:
        """See TokenShardObjective."""
        return config.training.sequence_length

    @classmethod
    def of(cls, config: SampleConfig, samples: Samples) -> Self:
        """See TokenShardObjective."""
        return cls(samples, document_mask=config.training.document_mask, padded=config.data.packing == "best_fit")

    def bytes_per_target(self, indices: np.ndarray) -> np.ndarray | None:
        """See Objective."""
        return self.samples.bytes_per_token(indices) if isinstance(self.samples, ValidationSamples) else None

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: tokens and targets; documents under a document mask."""
        text = self.samples.samples(indices)
        arrays = {"tokens": text[:, :-1], "targets": text[:, 1:]}
        if self._padded:
            end = self.samples.end_of_document
            padding = (arrays["tokens"] == end) & (arrays["targets"] == end)
            arrays["targets"] = np.where(padding, np.int32(IGNORE), arrays["targets"].astype(np.int32))
        if self._document_mask:
            arrays["documents"] = document_ids(arrays["tokens"], self.samples.end_of_document)
        return arrays
