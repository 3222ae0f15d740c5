"""Direct preference optimization: prefer one answer to another (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290)."""

from __future__ import annotations

import numpy as np

from pipeline.data.load.objectives.supervised import Supervised
from pipeline.data.load.prompts_and_answers import ExampleReader, PairReader


class Preferences(Supervised):
    """Pairs of answers to the same prompt. A sequence has both, each with the prompt, as two documents."""

    reader: type[ExampleReader] = PairReader

    #: Those of layers/preference.py preference_loss, which loads torch.
    sums: int = 4

    #: fp32 (pairs, 2), log-probabilities of both answers under the reference model, in the order of the files; None if steps compute them.
    reference: np.ndarray | None = None

    @property
    def documents(self) -> int:
        """See Objective: pairs."""
        return int(self.samples.counts[0])

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: as Supervised, the choices, and the log-probabilities of the reference if they are known, fp32 (n, 2)."""
        arrays = super().arrays(indices)
        arrays["choices"] = np.select([arrays["documents"] == 0, arrays["documents"] == 1], [1, -1], 0)
        if self.reference is not None:
            arrays["reference"] = self.reference[self.samples.places(indices)]
        return arrays

    def measures(self, sums: np.ndarray) -> dict[str, float]:
        """See Objective: mean rewards of both answers, their difference, and how often the preferred one has the larger."""
        chosen, rejected, accuracy = (sums[:3] / max(sums[3], 1)).tolist()
        named = {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected, "accuracy": accuracy}
        return {f"validation_rewards_{name}": value for name, value in named.items()}
