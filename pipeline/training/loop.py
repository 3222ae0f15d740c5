"""The training loop: next batch, step, metrics, checkpoint. All state is the engine's and the number of samples consumed."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.checkpoint import save
from pipeline.checkpoint.format import Index, Progress
from pipeline.checkpoint.reader import Checkpoint
from pipeline.config import warmup
from pipeline.config.schema import RunConfig
from pipeline.data.load import blend
from pipeline.data.load.objectives.objective import Objective
from pipeline.progress import Progress as Bar
from pipeline.training.batches import Batches
from pipeline.training.metrics import Metrics
from pipeline.training.trainer import Trainer

log = logging.getLogger("pipeline")


def train(
    config: RunConfig,
    trainer: Trainer,
    training_data: Objective,
    validation_data: Objective | None,
    progress: Progress,
    metrics: Metrics,
) -> Progress:
    """Train from `progress` to the configured number of steps.

    Args:
        config: of the run.
        trainer: with the state that belongs to `progress`.
        training_data: the train split.
        validation_data: the validation split, None if there is none.
        progress: where to continue.
        metrics: where the numbers go.

    Returns:
        The progress at the end.
    """
    training, checkpoint = config.training, config.checkpoint
    batches = Batches(training_data, config, trainer.mesh)
    started = time.monotonic()
    with Bar(training.steps - progress.step, "pretrain", "step", trainer.mesh.rank, every=math.inf) as bar:
        for tokens, batch in batches.training(progress.samples, range(progress.step, training.steps)):
            waited = time.monotonic() - started
            loss, result = trainer.train(tokens, batch)
            size = warmup.batch_size(training, progress.step)
            progress = Progress(progress.step + 1, progress.samples + size, progress.updates)
            now = time.monotonic()
            metrics.add(progress, loss, result, size, now - started, {"data_seconds": waited, "data_stalls": batches.stalls})
            started = now
            bar.advance(1, f"loss {metrics.last['loss']:.3f}" if metrics.last else "")

            last = progress.step == training.steps
            if validation_data is not None and (last or (training.validate_every and progress.step % training.validate_every == 0)):
                validate(config, trainer, validation_data, progress.step, metrics, training.validation_batches)
                started = time.monotonic()
            if last or (checkpoint.every and progress.step % checkpoint.every == 0):
                metrics.flush()
                progress = dataclasses.replace(progress, updates=trainer.engine.updates())
                index = Index(progress, dataclasses.asdict(config), blend.fingerprint(config, training_data.samples, progress.samples))
                path = save.save(Path(config.run_dir), index, trainer.engine.fragments(), checkpoint.keep)
                log.info("step %d: wrote %s", progress.step, path)
                started = time.monotonic()
    return progress


def validate(
    config: RunConfig, trainer: Trainer, data: Objective, step: int, metrics: Metrics | None, batches: int | None
) -> tuple[float, float | None]:
    """Mean loss and bits per byte over the first global batches of the validation split (all of it when `batches` is None).

    The split is read in whole global batches; a last one that it does not fill goes on with the split's beginning.

    Returns:
        (nats a target, bits a byte; None where the objective does not predict every token).
    """
    whole = math.ceil(int(data.samples.counts[0]) / config.training.global_batch_size)
    count = whole if batches is None else min(batches, whole)
    source = Batches(data, config, trainer.mesh)
    total = torch.zeros((), device=trainer.mesh.device)
    with Bar(count, "validate", "batch", trainer.mesh.rank) as bar:
        for tokens, batch in source.validation(count):
            total += trainer.evaluate(tokens, batch)
            bar.advance(1)
    loss = float(total) / count
    bits = loss / math.log(2) / data.bytes_per_token if data.bytes_per_token else None
    if metrics is not None:
        metrics.validation(step, loss, bits)
    return loss, bits


def resume(config: RunConfig, trainer: Trainer, path: Path | None, training_data: Objective) -> Progress:
    """Read a checkpoint into the trainer; the beginning when there is none.

    The checkpoint must have seen what the samples that it consumed are now.

    Raises:
        UserError: it belongs to another model or other data, or is corrupt.
    """
    if path is None:
        return Progress()
    checkpoint = Checkpoint(path)
    seen = blend.fingerprint(config, training_data.samples, checkpoint.progress.samples)
    save.check_same_run(checkpoint, dataclasses.asdict(config), seen)
    save.load(checkpoint, trainer.engine.fragments())
    trainer.engine.loaded(checkpoint.progress.updates)
    dist.barrier()
    log.info("continuing from %s: step %d, %d samples", path, checkpoint.progress.step, checkpoint.progress.samples)
    return checkpoint.progress
