"""The length of a fine-tuning run: training.epochs as a number of steps, once the data is open."""

from __future__ import annotations

import logging
import math

from pipeline.common import knobs
from pipeline.common.errors import UserError
from pipeline.config import warmup
from pipeline.config.rules import optimizer
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.objective import Objective

log = logging.getLogger("pipeline")


def with_steps(config: RunConfig, data: Objective, rank: int) -> RunConfig:
    """Return the configuration with the smallest number of steps that reads every sequence training.epochs times.

    It depends on the data and the batches only, so that a resumed run has the same one. A configuration with training.steps is unchanged.

    Args:
        config: of the run.
        data: of its training.
        rank: of this process; rank 0 logs.

    Raises:
        UserError: the warm-up or the decay is longer than the run.
    """
    training, samples = config.training, int(sum(data.samples.counts))
    if not training.steps:
        epochs = training.epochs or warmup.DEFAULT_EPOCHS
        wanted = math.ceil(epochs * samples - 1e-6)  # 0.1 x 30 is more than 3 in floating point
        steps = max(1, warmup.steps_for_samples(training, wanted))
        config = knobs.changed(config, {"training.steps": steps, "training.epochs": epochs})
        if violations := list(optimizer.violations(config)):
            raise UserError(violations)
        if rank == 0:
            log.info("training.epochs=%g of %s sequences: %s steps", epochs, f"{samples:,}", f"{config.training.steps:,}")
    if rank == 0 and config.stage.name == "finetune" and training.global_batch_size > samples:
        text = "training.global_batch_size=%d is more than an epoch of %s sequences: a step reads examples several times; lower it"
        log.warning(text, training.global_batch_size, f"{samples:,}")
    return config
