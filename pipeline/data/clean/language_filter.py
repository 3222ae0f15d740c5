"""The step that keeps selected languages."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pipeline.config.cleaning import LanguageStep
from pipeline.data.clean.document_batch import DocumentBatch, Step, Verdict, drop


def language(knobs: LanguageStep) -> Step:
    """Drop documents in other languages, or with too small a share of the main language. If `keep` is empty, all documents are kept."""
    wanted = set(knobs.keep)

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        languages = batch.languages
        if not wanted:
            return ()
        other = np.array([code not in wanted for code, _ in languages])
        unclear = np.array([share < knobs.share for _, share in languages])
        return drop(batch, [(other, "other language"), (unclear, "language unclear")])

    return step
