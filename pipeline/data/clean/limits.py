"""Thresholds of a step for every document: those of its language, or else the general ones."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.common import languages
from pipeline.data.clean.document_batch import DocumentBatch


class Limits:
    """The thresholds of a step for the documents of a batch.

    Args:
        knobs: the keys of the step; `by_language` holds the values of single languages.
    """

    def __init__(self, knobs: Any, batch: DocumentBatch) -> None:
        self._knobs, self._batch = knobs, batch

    def __getitem__(self, key: str) -> np.ndarray:
        """(texts,) values of a key; (texts, n) of a key that is a list of n numbers."""
        general = getattr(self._knobs, key)
        own = languages.by_label({code: values[key] for code, values in self._knobs.by_language.items() if key in values})
        if not own:
            return np.broadcast_to(np.array(general), (len(self._batch.texts), *np.shape(general)))
        return np.array([own.get(label, general) for label, _ in self._batch.languages])
