"""The next token, from all before it."""

from __future__ import annotations

from typing import Self

import numpy as np

from pipeline.config.schema import RunConfig
from pipeline.data.load.boundaries import document_ids
from pipeline.data.load.loader import Samples
from pipeline.data.load.objectives.objective import IGNORE, Objective


class Causal(Objective):
    """Each position's target is the next token."""

    samples: Samples

    def __init__(self, samples: Samples, *, document_mask: bool = False, padded: bool = False) -> None:
        """Take samples of whole sequences and one token more.

        Args:
            samples: the text.
            document_mask: tell documents apart.
            padded: what comes of whole documents is followed by end-of-document tokens, which are no targets.
        """
        self.samples, self.bytes_per_token = samples, samples.bytes_per_token
        self._document_mask, self._padded = document_mask, padded

    @staticmethod
    def text_length(config: RunConfig) -> int:
        """See Objective."""
        return config.training.sequence_length

    @classmethod
    def of(cls, config: RunConfig, samples: Samples) -> Self:
        """See Objective."""
        return cls(samples, document_mask=config.training.document_mask, padded=config.data.packing == "best_fit")

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective."""
        text = self.samples.samples(indices)
        found = {"tokens": text[:, :-1], "targets": text[:, 1:]}
        if self._padded:
            end = self.samples.end_of_document
            padding = (found["tokens"] == end) & (found["targets"] == end)
            found["targets"] = np.where(padding, np.int32(IGNORE), found["targets"].astype(np.int32))
        if self._document_mask:
            found["documents"] = document_ids(found["tokens"], self.samples.end_of_document)
        return found
