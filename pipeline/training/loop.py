"""The training loop: batch, step, metrics, validation, checkpoint. The state is that of the engine and the number of consumed samples."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.checkpoint import save
from pipeline.checkpoint.native import Index, TrainState
from pipeline.checkpoint.reader import Checkpoint
from pipeline.config import warmup
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.objective import Objective
from pipeline.progress import Progress
from pipeline.training.batches import BatchLoader
from pipeline.training.metrics import Metrics
from pipeline.training.trainer import Trainer

log = logging.getLogger("pipeline")


def train(
    config: RunConfig,
    trainer: Trainer,
    training_data: Objective,
    validation_data: Objective | None,
    state: TrainState,
    metrics: Metrics,
) -> TrainState:
    """Train from `state` up to training.steps.

    Args:
        config: configuration of the run.
        trainer: its model and optimizer are in the state `state`.
        training_data: the training split.
        validation_data: the validation split, None if there is none.
        state: the state to continue from.
        metrics: writer of metrics.jsonl.

    Returns:
        The final state.
    """
    training, checkpoint = config.training, config.checkpoint
    loader = BatchLoader(training_data, config, trainer.mesh)
    started = time.monotonic()
    with Progress(training.steps - state.step, "pretrain", "step", trainer.mesh.rank, every=math.inf) as bar:
        for tokens, batch in loader.training(state.samples, range(state.step, training.steps)):
            waited = time.monotonic() - started
            loss, result = trainer.train(tokens, batch)
            size = warmup.batch_size(training, state.step)
            state = TrainState(state.step + 1, state.samples + size, state.updates)
            now = time.monotonic()
            metrics.add(state, loss, result, size, now - started, {"data_seconds": waited, "data_stalls": loader.stalls})
            started = now
            bar.advance(1, f"loss {metrics.last['loss']:.3f}" if metrics.last else "")

            last = state.step == training.steps
            if validation_data is not None and (last or (training.validate_every and state.step % training.validate_every == 0)):
                validate(config, trainer, validation_data, state.step, metrics, training.validation_batches)
                started = time.monotonic()
            if last or (checkpoint.every and state.step % checkpoint.every == 0):
                metrics.flush()
                state = dataclasses.replace(state, updates=trainer.engine.updates())
                index = Index(state, dataclasses.asdict(config), training_data.fingerprint(config, state.samples))
                path = save.save(Path(config.run_dir), index, trainer.engine.fragments(), checkpoint.keep)
                log.info("step %d: wrote %s", state.step, path)
                started = time.monotonic()
    return state


def validate(
    config: RunConfig, trainer: Trainer, data: Objective, step: int, metrics: Metrics | None, batches: int | None
) -> tuple[float, float | None]:
    """Compute mean loss and bits per byte over the first `batches` global batches of the validation split (all of it when None).

    Only full global batches are read; the last one is filled up from the start of the split.

    Returns:
        (nats per target, bits per byte); the latter is None if the objective does not predict every token.
    """
    available = math.ceil(int(data.samples.counts[0]) / config.training.global_batch_size)
    count = available if batches is None else min(batches, available)
    loader = BatchLoader(data, config, trainer.mesh)
    total = torch.zeros((), device=trainer.mesh.device)
    with Progress(count, "validate", "batch", trainer.mesh.rank) as bar:
        for tokens, batch in loader.validation(count):
            total += trainer.evaluate(tokens, batch)
            bar.advance(1)
    loss = float(total) / count
    bits = loss / math.log(2) / data.bytes_per_token if data.bytes_per_token else None
    if metrics is not None:
        metrics.validation(step, loss, bits)
    return loss, bits


def resume(config: RunConfig, trainer: Trainer, path: Path | None, training_data: Objective) -> TrainState:
    """Load a checkpoint into the trainer, and return its state; the initial state when `path` is None.

    The samples that the checkpoint has consumed must be those of the current data configuration.

    Raises:
        UserError: the checkpoint is of another model or other data, or is corrupt.
    """
    if path is None:
        return TrainState()
    checkpoint = Checkpoint(path)
    save.check_same_run(checkpoint, config, training_data)
    save.load(checkpoint, trainer.engine.fragments())
    trainer.engine.loaded(checkpoint.train_state.updates)
    dist.barrier()
    log.info("continuing from %s: step %d, %d samples", path, checkpoint.train_state.step, checkpoint.train_state.samples)
    return checkpoint.train_state
