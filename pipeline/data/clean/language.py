"""The step that keeps the wanted languages."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pipeline.config.cleaning import LanguageStep
from pipeline.data.clean.batch import Batch, Step, Verdict, drop


def language(knobs: LanguageStep) -> Step:
    """Documents in other languages than the wanted ones, or in none clearly enough. Without wanted languages every document stays."""
    wanted = set(knobs.keep)

    def step(batch: Batch) -> Iterable[Verdict]:
        found = batch.languages
        if not wanted:
            return ()
        other = np.array([code not in wanted for code, _ in found])
        unclear = np.array([share < knobs.share for _, share in found])
        return drop(batch, [(other, "other language"), (unclear, "language unclear")])

    return step
