"""Direct preference optimization: prefer one answer to another (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290)."""

from __future__ import annotations

import numpy as np

from pipeline.data.load.objectives.supervised import Supervised
from pipeline.data.load.prompts_and_answers import ExampleReader, PairReader


class Preferences(Supervised):
    """Pairs of answers to the same prompt. A sequence has both, each with the prompt, as two documents."""

    reader: type[ExampleReader] = PairReader

    @property
    def documents(self) -> int:
        """See Objective: pairs."""
        return int(self.samples.counts[0])

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: as Supervised, and the choices."""
        arrays = super().arrays(indices)
        arrays["choices"] = np.select([arrays["documents"] == 0, arrays["documents"] == 1], [1, -1], 0)
        return arrays
