"""The step that keeps selected languages."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pipeline.common import languages
from pipeline.config.cleaning import LanguageStep
from pipeline.data.clean.document_batch import DocumentBatch, Step, Verdict, drop


def language(knobs: LanguageStep) -> Step:
    """Drop documents in other languages, or with too small a share of the main language. If `keep` is empty, all documents are kept."""
    wanted = {label for code in knobs.keep for label in languages.covered(code)}

    def step(batch: DocumentBatch) -> Iterable[Verdict]:
        found = batch.languages
        if not wanted:
            return ()
        other = np.array([label not in wanted for label, _ in found])
        unclear = np.array([share < knobs.share for _, share in found])
        return drop(batch, [(other, "other language"), (unclear, "language unclear")])

    return step
