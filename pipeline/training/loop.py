"""The training loop: batch, step, metrics, validation, checkpoint. The state is that of the engine and the number of consumed samples."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

from pipeline.checkpoint.native import TrainState
from pipeline.checkpoint.saver import Saver
from pipeline.common.errors import CONTINUE, ToBeContinued
from pipeline.common.progress import Progress
from pipeline.config import warmup
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.objective import Objective
from pipeline.training.batch_loader import BatchLoader
from pipeline.training.checkpoint_hooks import CheckpointHooks
from pipeline.training.loss_spikes import LossSpikes
from pipeline.training.metrics import Metrics, memory_used
from pipeline.training.profiling import Profiler
from pipeline.training.recomputation_checks import RecomputationChecks
from pipeline.training.replica_checks import ReplicaChecks
from pipeline.training.rewinds import SpikeFoundError
from pipeline.training.saves import Saves
from pipeline.training.skipped_samples import NONE, SkippedSamples
from pipeline.training.step_control import StepControl
from pipeline.training.stragglers import Stragglers
from pipeline.training.trainer import Trainer
from pipeline.training.validation import validate
from pipeline.training.watchdog import Watchdog

log = logging.getLogger("pipeline")


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
    saver: Saver,
    parent: dict[str, Any] | None = None,
    last_step: int | None = None,
    spikes: LossSpikes | None = None,
    skipped: SkippedSamples = NONE,
    stragglers: Stragglers | None = None,
    profiler: Profiler | None = None,
    replicas: ReplicaChecks | None = None,
    recomputation: RecomputationChecks | None = None,
) -> TrainState:
    """Train from `state` up to training.steps, or until a signal or a file asks for the end of the job, or the run needs other nodes.

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
        saver: writes the checkpoints.
        parent: Index.parent of the checkpoints.
        last_step: number of steps after which this job ends; None if it trains up to training.steps.
        spikes: finds loss spikes, on rank 0; None if training.spike_factor is 0.
        skipped: samples that are left out.
        stragglers: names slow nodes.
        profiler: profiles single steps.
        replicas: compares the copies that ranks hold.
        recomputation: compares forward passes of ranks.

    Returns:
        The final state; its checkpoint has been written.

    Raises:
        UserError: copies of weights or bits of a forward pass differ, too many steps in a row were skipped, the weights are not finite, too
            many checkpoints in a row or the last one could not be written, or the run directory was removed.
        ToBeContinued: a signal or the file `stop` ended the job, or it has made `last_step` steps, and a checkpoint was written.
        SpikeFoundError: the loss has spiked; no checkpoint is being written.
    """
    training, checkpoint = config.training, config.checkpoint
    loader = BatchLoader(training_data, training, trainer.mesh, config.data.prefetch)
    saves = Saves(config, trainer, training_data, metrics, watchdog, hooks, saver, parent)
    trainer.before_update = saves.before_update
    if spikes is not None and spikes.found_on_rank_0():  # in the last steps of the job before this one
        raise SpikeFoundError(state, spikes.found)
    started = time.monotonic()
    with Progress(training.steps - state.step, config.stage.name, "step", trainer.mesh.rank, every=math.inf) as bar:
        watchdog.report(f"loading the batch of step {state.step + 1}")
        for tokens, batch in loader.remaining(state, skipped):
            waited = time.monotonic() - started
            watchdog.report(f"step {state.step + 1}")
            failed, fatal = saves.requests()
            rewind = spikes is not None and spikes.found is not None
            number = state.step + 1
            profiled = nullcontext() if profiler is None else profiler.step(number)
            with nullcontext() if stragglers is None else stragglers.step(number), profiled:
                loss, result = trainer.train(tokens, batch, control.requests(failed=failed, fatal=fatal, rewind=rewind), state.step)
            size = warmup.batch_size(training, state.step)
            state = dataclasses.replace(state, step=state.step + 1, samples=skipped.after(state.samples, size))
            now = time.monotonic()
            more = {"data_seconds": waited, "data_stalls": loader.stalls, "save_failures": saves.failures, **memory_used()}
            metrics.add(state, loss, result, size, now - started, more)
            started = now
            bar.advance(1, f"loss {metrics.last['loss']:.3f}" if metrics.last else "")

            last = state.step == training.steps
            if spikes is not None:
                if last:
                    metrics.flush()
                spikes.observe(metrics.last)
            decision = control.after_step(result, last=last)
            ends_phase = state.step == last_step and not last
            stop = CONTINUE if decision.stop is None and ends_phase else decision.stop
            saves.poll()
            control.complete(saves.complete)
            saves.act(failed=decision.failed, fatal=decision.fatal)
            if spikes is not None and (decision.rewind or (last and spikes.found_on_rank_0())):
                saves.settle(state.step)
                raise SpikeFoundError(state, spikes.found)
            if validation_data is not None and (last or (training.validate_every and state.step % training.validate_every == 0)):
                report = partial(watchdog.report, f"validation after step {state.step}")
                report()
                batches, prefetch = training.validation_batches, config.data.prefetch
                found = validate(trainer, validation_data, training, batches=batches, prefetch=prefetch, on_batch=report)
                metrics.validation(state.step, found, validation_data.identity)
                started = time.monotonic()
            scheduled = bool(checkpoint.every and state.step % checkpoint.every == 0) or state.step in config.optimizer.decay_ends
            saving = last or decision.save or stop is not None or scheduled or hooks.writes(state.step)
            if replicas is not None:
                replicas.after_step(state.step, result, saving=saving)
            if recomputation is not None:
                recomputation.after_step(state.step, tokens, batch)
            if saving:
                saves.begin(state)
                control.saving(state.step)
                started = time.monotonic()
            if last or stop is not None:
                state = saves.finish(state)
                control.complete(state.step)
                control.stopped()
            if stop is not None and not last:
                other = " on other nodes" if ends_phase else ""
                log.info("stopped after step %d; the same command continues%s", state.step, other)
                raise ToBeContinued(stop, "stop" if decision.asked else "phase" if decision.stop is None else "")
            watchdog.report(f"loading the batch of step {state.step + 1}")
    return state
