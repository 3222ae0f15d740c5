"""Part "validation": the loss of a split, as training computes it in the layout, and its mean over all targets in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.certification.batches import Rows, random_split, with_loss_scale
from pipeline.certification.parts import PartReport
from pipeline.certification.reference import build_plain
from pipeline.certification.reference_loss import reference_loss
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.objective import Objective
from pipeline.layers.batch import Batch
from pipeline.training.trainer import Trainer
from pipeline.training.validation import validate

#: Largest relative difference of the losses, in fp32.
TOLERANCE = 1e-5


class _Split:
    """A split of random sequences, with the members of Objective that a validation uses."""

    sums = 0

    def __init__(self, tokens: Tensor, batch: Batch) -> None:
        self._rows = {"tokens": tokens, **cast(Rows, batch)}
        self.parts = [("random", len(tokens))]

    def validation_sample(self, _size: int | None) -> np.ndarray:
        """See Objective."""
        return np.arange(len(self._rows["tokens"]))

    def bytes_per_target(self, _indices: np.ndarray) -> None:
        """See Objective."""

    def measures(self, _sums: np.ndarray) -> dict[str, float]:
        """See Objective."""
        return {}

    def arrays(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See Objective."""
        return {name: values[torch.from_numpy(indices)].numpy() for name, values in self._rows.items()}


def report(config: RunConfig, trainer: Trainer, weights: Mapping[str, Tensor]) -> PartReport:
    """Compare the losses. Collective; the result of rank 0 counts.

    Args:
        config: of the small run, fp32.
        trainer: after training.
        weights: of the trainer, unsharded, by name.
    """
    rows = config.training.global_batch_size + 1  # the second batch has one sequence, and padding for the other ranks
    tokens, batch = random_split(config, rows)
    validation = validate(trainer, cast(Objective, _Split(tokens, batch)), config.training, batches=None, prefetch=1)
    found = PartReport("validation", [f"the loss of {rows} sequences with different numbers of targets, as a run computes it"])
    if dist.get_rank():
        return found
    model = build_plain(config, torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        batch.pop("next_sentence", None)
        expected = float(reference_loss(model, tokens, with_loss_scale(batch)))
    if not abs(validation.loss - expected) <= TOLERANCE * abs(expected):
        found.failures.append(f"the loss of the split is {validation.loss:.7g} in the layout, {expected:.7g} over all targets")
    return found
