"""Direct preference optimization: prefer one answer to another (Rafailov et al. 2023, https://arxiv.org/abs/2305.18290)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline.common.errors import Violation
from pipeline.config.schema import RunConfig
from pipeline.data.load.examples import ExampleReader, PairReader
from pipeline.data.load.objectives.supervised import Supervised


class Preferences(Supervised):
    """Pairs of answers to the same prompt. A sequence has both, each with the prompt, as two documents."""

    reader: type[ExampleReader] = PairReader

    @staticmethod
    def violations(config: RunConfig) -> Iterator[Violation]:
        """See Objective."""
        yield from Supervised.violations(config)
        if config.lora.rank == 0:
            rule = "trains adapters only: the reference model is the model without them"
            yield Violation("training.objective", "dpo", rule, "set lora.rank=16, or another rank above 0")
        if config.lora.modules_to_save:
            rule = "would change the reference model, which is the model without adapters"
            yield Violation("lora.modules_to_save", ", ".join(config.lora.modules_to_save), rule, "leave it empty")
        if config.lora.adapter is not None:
            rule = "would not be part of the reference model, which is the model without adapters"
            fix = "merge it into the weights first (stage=convert stage.adapter), and start from those"
            yield Violation("lora.adapter", config.lora.adapter, rule, fix)
        if config.stage.name == "evaluate":
            rule = "needs the adapter apart from the weights, and stage=evaluate merges it"
            yield Violation("training.objective", "dpo", rule, "read validation_loss in metrics.jsonl (data.instructions.validation)")

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective: as Supervised, and the choices."""
        found = super().arrays(indices)
        found["choices"] = np.select([found["documents"] == 0, found["documents"] == 1], [1, -1], 0)
        return found
