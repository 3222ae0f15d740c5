"""The loss of the validation split, during training and by stage=evaluate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.common.progress import Progress
from pipeline.config.schema import TrainingConfig
from pipeline.data.load.objectives.objective import Objective
from pipeline.training.batch_loader import BatchLoader
from pipeline.training.trainer import Trainer


@dataclass(frozen=True)
class Validation:
    """The result of a validation.

    Attributes:
        loss: nats per target.
        bits_per_byte: None if the objective does not predict every token.
        measures: those of Objective.measures.
        sums: what they were computed from, fp64 (Objective.sums,).
    """

    loss: float
    bits_per_byte: float | None
    measures: dict[str, float]
    sums: np.ndarray


def validate(
    trainer: Trainer,
    data: Objective,
    training: TrainingConfig,
    *,
    batches: int | None,
    prefetch: int,
    on_batch: Callable[[], None] = lambda: None,
) -> Validation:
    """Compute the mean loss over the first global batches of a split; collective.

    Every target of these batches counts once, so the result for a full split does not depend on the batch size.

    Args:
        trainer: computes the losses.
        data: the split.
        training: sequence length and batch sizes.
        batches: number of global batches, None for all of them.
        prefetch: batches that are loaded ahead.
        on_batch: called after every batch.
    """
    samples = int(data.samples.counts[0])
    available = math.ceil(samples / training.global_batch_size)
    count = available if batches is None else min(batches, available)
    loader = BatchLoader(data, training, trainer.mesh, prefetch)
    measured = torch.zeros(data.sums, dtype=torch.float64, device=trainer.mesh.device)
    sums = torch.zeros(2, dtype=torch.float64, device=trainer.mesh.device)  # of the losses, and the number of targets
    with Progress(count, "validate", "batch", trainer.mesh.rank) as bar:
        for tokens, batch in loader.validation(count, samples):
            mean, targets = trainer.evaluate(tokens, batch)
            sums += torch.stack([mean.double() * targets, targets.double()])
            if data.sums:
                measured += trainer.measured(data.sums).double()
            bar.advance(1)
            on_batch()
    loss, found = float(sums[0] / sums[1]), measured.cpu().numpy()
    bits = loss / math.log(2) / data.bytes_per_token if data.bytes_per_token else None
    return Validation(loss, bits, data.measures(found), found)
