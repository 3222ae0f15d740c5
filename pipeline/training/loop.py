"""The training loop: batch, step, metrics, validation, checkpoint. The state is that of the engine and the number of consumed samples."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from pipeline.checkpoint import save
from pipeline.checkpoint.native import Index, TrainState
from pipeline.common.errors import ToBeContinued
from pipeline.common.progress import Progress
from pipeline.config import warmup
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.objective import Objective
from pipeline.layers.batch import Batch
from pipeline.parallel.mesh import INPUT_OUTPUT, on_rank_0
from pipeline.training.batch_loader import BatchLoader
from pipeline.training.metrics import Metrics, memory_used
from pipeline.training.step_control import StepControl
from pipeline.training.trainer import Trainer
from pipeline.training.watchdog import Watchdog

log = logging.getLogger("pipeline")


@dataclass(frozen=True)
class CheckpointHooks:
    """What somebody else wants of a run's checkpoints.

    Attributes:
        writes: whether the checkpoint of a step is written besides those that the run writes anyway; the same on all ranks.
        keeps: whether an older checkpoint is not removed yet; called on rank 0.
        written: called on rank 0 after a checkpoint of `writes` was written.
    """

    writes: Callable[[int], bool] = lambda _: False
    keeps: Callable[[Path], bool] = lambda _: False
    written: Callable[[], None] = lambda: None


def train(
    config: RunConfig,
    trainer: Trainer,
    training_data: Objective,
    validation_data: Objective | None,
    state: TrainState,
    metrics: Metrics,
    control: StepControl,
    watchdog: Watchdog,
    hooks: CheckpointHooks,
) -> TrainState:
    """Train from `state` up to training.steps, or until a signal announces the end of the job.

    Args:
        config: configuration of the run.
        trainer: its model and optimizer are in the state `state`.
        training_data: the training split.
        validation_data: the validation split, None if there is none.
        state: the state to continue from.
        metrics: writer of metrics.jsonl.
        control: decides when to save and to stop.
        watchdog: to which progress is reported.
        hooks: further checkpoints, and what follows them.

    Returns:
        The final state; its checkpoint has been written.

    Raises:
        UserError: too many steps in a row were skipped, the weights are not finite, a checkpoint could not be written, or the run directory
            was removed.
        ToBeContinued: a signal announced the end of the job, and a checkpoint was written.
    """
    training, checkpoint = config.training, config.checkpoint
    loader = BatchLoader(training_data, config, trainer.mesh)
    started = time.monotonic()
    with Progress(training.steps - state.step, config.stage.name, "step", trainer.mesh.rank, every=math.inf) as bar:
        watchdog.report(f"loading the batch of step {state.step + 1}")
        for tokens, batch in loader.training(state.samples, range(state.step, training.steps)):
            waited = time.monotonic() - started
            watchdog.report(f"step {state.step + 1}")
            loss, result = trainer.train(tokens, batch, control.requests(), state.step)
            size = warmup.batch_size(training, state.step)
            state = dataclasses.replace(state, step=state.step + 1, samples=state.samples + size)
            now = time.monotonic()
            metrics.add(state, loss, result, size, now - started, {"data_seconds": waited, "data_stalls": loader.stalls, **memory_used()})
            started = now
            bar.advance(1, f"loss {metrics.last['loss']:.3f}" if metrics.last else "")

            last = state.step == training.steps
            decision = control.after_step(result, last=last)
            if validation_data is not None and (last or (training.validate_every and state.step % training.validate_every == 0)):
                watchdog.report(f"validation after step {state.step}")
                validate(config, trainer, validation_data, state.step, metrics, training.validation_batches, watchdog)
                started = time.monotonic()
            hooked = hooks.writes(state.step)
            scheduled = bool(checkpoint.every and state.step % checkpoint.every == 0)
            if last or decision.save or decision.stop is not None or scheduled or hooked:
                metrics.flush()
                watchdog.report(f"checkpoint of step {state.step}", INPUT_OUTPUT)
                on_rank_0(metrics.check_file)
                factor, finite_steps = trainer.engine.loss_scale.state()
                state = dataclasses.replace(state, updates=trainer.engine.updates(), loss_scale=factor, finite_steps=finite_steps)
                index = Index(state, dataclasses.asdict(config), training_data.fingerprint(config, state.samples))
                path = save.save(Path(config.run_dir), index, trainer.engine.fragments(), checkpoint.keep, hooks.keeps)
                log.info("step %d: wrote %s", state.step, path)
                if hooked and trainer.mesh.rank == 0:
                    hooks.written()
                control.saved()
                started = time.monotonic()
            if decision.stop is not None and not last:
                log.info("stopped after step %d; the same command continues", state.step)
                raise ToBeContinued(decision.stop)
            watchdog.report(f"loading the batch of step {state.step + 1}")
    return state


def validate(
    config: RunConfig,
    trainer: Trainer,
    data: Objective,
    step: int,
    metrics: Metrics | None,
    batches: int | None,
    watchdog: Watchdog | None = None,
) -> tuple[float, float | None]:
    """Compute mean loss and bits per byte over the first `batches` global batches of the validation split (all of it when None).

    Every target of these batches counts once, so the result for a full split does not depend on the batch size. The measures of
    the objective are written to the metrics.

    Returns:
        (nats per target, bits per byte); the latter is None if the objective does not predict every token.
    """
    samples = int(data.samples.counts[0])
    available = math.ceil(samples / config.training.global_batch_size)
    count = available if batches is None else min(batches, available)
    loader = BatchLoader(data, config, trainer.mesh)
    measured = dict.fromkeys(data.measures, 0.0)
    sums = torch.zeros(2, dtype=torch.float64, device=trainer.mesh.device)  # of the losses, and the number of targets
    with Progress(count, "validate", "batch", trainer.mesh.rank) as bar:
        for tokens, batch in loader.validation(count, samples):
            mean, targets = trainer.evaluate(tokens, batch)
            sums += torch.stack([mean.double() * targets, targets.double()])
            for name in measured:
                value, _ = trainer.evaluate(tokens, cast(Batch, {**batch, name: torch.ones(len(tokens), device=tokens.device)}))
                measured[name] += float(value.double() * targets.double())
            bar.advance(1)
            if watchdog is not None:
                watchdog.report(f"validation after step {step}")
    loss = float(sums[0] / sums[1])
    bits = loss / math.log(2) / data.bytes_per_token if data.bytes_per_token else None
    if metrics is not None:
        metrics.validation(step, loss, bits, {name: value / float(sums[1]) for name, value in measured.items()})
    return loss, bits
