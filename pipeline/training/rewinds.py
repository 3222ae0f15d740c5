"""The return of a run to the newest checkpoint before a loss spike, without the samples from there to the end of the spike.

As in PaLM (Chowdhery et al. 2022, section 5.1): the samples seen before and during the spike are skipped, since spikes come from a
combination of certain batches and a certain state of the weights. Everything follows from skipped_samples.json, written first: a job
that is killed then leaves checkpoints of the abandoned steps, which the next one removes before it chooses where to start.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline.checkpoint import catalog, native
from pipeline.checkpoint.native import TrainState
from pipeline.common import events
from pipeline.common.atomic_files import remove_folder
from pipeline.common.errors import DamagedCheckpointError, UserError
from pipeline.config import warmup
from pipeline.config.schema import RunConfig
from pipeline.data.load.objectives.objective import Objective
from pipeline.parallel.mesh import on_rank_0
from pipeline.training import resume, skipped_samples
from pipeline.training.callback import Callback, Step
from pipeline.training.loss_spikes import DELAY, LossSpikes, Spike
from pipeline.training.metrics import Metrics
from pipeline.training.saves import Saves
from pipeline.training.skipped_samples import Rewind, SkippedSamples
from pipeline.training.starting_checkpoint import FORK, starting_checkpoint
from pipeline.training.trainer import Trainer

log = logging.getLogger("pipeline")


class SpikeFoundError(Exception):
    """Ends the training loop on all ranks, since the loss has spiked.

    Args:
        state: after the last step that was made.
        spike: on rank 0, None on others.
    """

    def __init__(self, state: TrainState, spike: Spike | None) -> None:
        super().__init__("loss spike")
        self.state, self.spike = state, spike


class SpikeWatch(Callback):
    """Ends the training loop after a loss spike, on all ranks, if training.spike_factor is set.

    A spike begins two steps after the first checkpoint of the run at the earliest; the checkpoint of a fork precedes all of its steps.

    Args:
        config: configuration of the run.
        state: with which the loop begins.
        metrics, saves: callbacks before this one.
        parent: Index.parent of the checkpoints.

    Raises:
        SpikeFoundError: the last steps of the job before this one, in metrics.jsonl, have spiked.
    """

    def __init__(self, config: RunConfig, state: TrainState, metrics: Metrics, saves: Saves, parent: dict[str, Any] | None = None) -> None:
        self._metrics, self._saves, self._is_on = metrics, saves, config.training.spike_factor > 0
        earliest = 0 if parent is not None and parent["how"] == FORK else config.checkpoint.every + 2
        self._spikes = LossSpikes(config.training, earliest, scaled=config.precision.dtype == "fp16")
        if self._is_on and dist.get_rank() == 0:
            self._spikes.restore(Path(config.run_dir))
        if self._is_on and self._found_on_rank_0():
            raise SpikeFoundError(state, self._spikes.found)

    def requests(self) -> Collection[str]:
        """See Callback."""
        return () if self._spikes.found is None else ("rewind",)

    def after_step(self, step: Step) -> None:
        """Judge the step before.

        Raises:
            SpikeFoundError: all ranks have learned of a spike, and no checkpoint is being written.
        """
        if not self._is_on:
            return
        if step.last:
            self._metrics.flush()
        self._spikes.observe(self._metrics.last)
        if step.decision.rewind or (step.last and self._found_on_rank_0()):
            self._saves.settle(step.state.step)
            raise SpikeFoundError(step.state, self._spikes.found)

    def _found_on_rank_0(self) -> bool:
        """Whether rank 0 has found a spike; collective."""
        found: bool = on_rank_0(lambda: self._spikes.found is not None)
        return found


def train(
    config: RunConfig,
    trainer: Trainer,
    data: Objective,
    state: TrainState,
    attempt: Callable[[TrainState, SkippedSamples], TrainState],
) -> TrainState:
    """Train, from an older checkpoint after every loss spike; every rank calls this.

    Args:
        config: configuration of the run.
        trainer: its model and optimizer are in the state `state`.
        data: the training split.
        state: the state to begin with.
        attempt: trains from a state without the samples that are skipped, and returns the final state.

    Raises:
        UserError: as of rewind. Other errors are those of an attempt.
    """
    skipped = on_rank_0(lambda: skipped_samples.read(Path(config.run_dir)))
    while True:
        try:
            return attempt(state, skipped)
        except SpikeFoundError as spike:
            found = spike
        path, skipped = on_rank_0(partial(rewind, config, found, skipped))
        state = resume.begin(config, trainer, path, data)


def rewind(config: RunConfig, found: SpikeFoundError, skipped: SkippedSamples) -> tuple[Path, SkippedSamples]:
    """Record a rewind and remove the checkpoints of the abandoned steps. Only rank 0 calls this.

    The checkpoint is at least two steps older than the first step of the spike: the step after it had a normal loss with its weights.

    Args:
        config: configuration of the run.
        found: the spike, and the state of the run.
        skipped: the samples that are skipped so far.

    Returns:
        The checkpoint to continue from, and the samples that are skipped from now on.

    Raises:
        UserError: training.max_rewinds is reached, or there is no such checkpoint.
    """
    run_dir, training, spike = Path(config.run_dir), config.training, found.spike
    assert spike is not None, "rank 0 has the spike"
    what = f"the loss spiked at step {spike.first} ({spike.reason}; {training.spike_patience} steps in a row)"
    if len(skipped.rewinds) >= training.max_rewinds:
        rule = f"{what}, after {len(skipped.rewinds)} rewinds of this run; {skipped_samples.FILE} lists them"
        fix = "reduce optimizer.lr or look at these samples; raise it to skip more of them, or continue with training.spike_factor=0"
        raise UserError.of("training.max_rewinds", training.max_rewinds, rule, fix)
    checkpoint = _checkpoint_before(config, spike.first, skipped)
    if checkpoint is None:
        rule = f"{what}, and no checkpoint of a step up to {spike.first - 2} is left to return to"
        raise UserError.of("training.spike_factor", training.spike_factor, rule, "raise checkpoint.keep, or set training.spike_factor=0")
    start = native.read_index(checkpoint).train_state
    last = found.state.samples
    for step in range(found.state.step, spike.last + DELAY):  # the same end, whenever an interrupted run learns of the spike
        last = skipped.after(last, warmup.batch_size(training, step))
    entry = Rewind(start.step, spike.first, spike.reason, start.samples, last)
    more = SkippedSamples([*skipped.rewinds, entry])
    count = len(more.rewinds)
    # Before the list: a job that is killed between them records the event twice, and none is missing.
    events.record(run_dir, "rewind", step=found.state.step, number=count, **dataclasses.asdict(entry))
    skipped_samples.write(run_dir, more)
    text = "%s: back to %s, without samples %d to %d (rewind %d of training.max_rewinds=%d)"
    log.warning(text, what, checkpoint, entry.first, entry.last - 1, count, training.max_rewinds)
    drop_abandoned(run_dir)
    return checkpoint, more


def drop_abandoned(run_dir: Path) -> None:
    """Remove the checkpoints of abandoned steps; those that a user keeps are renamed. The caller holds the lock of the run directory."""
    skipped = skipped_samples.read(run_dir)
    dropped = []
    for folder in reversed(native.complete(run_dir)) if skipped.rewinds else ():
        with suppress(DamagedCheckpointError):  # reported when it is loaded
            if not skipped.are_of(native.read_index(folder).train_state.samples):
                break
            dropped.append(folder)
    for folder in dropped:
        if (folder / catalog.KEEP).is_file():
            log.warning("%s is of steps that the run has abandoned: renamed to %s", folder, native.set_aside(folder, "abandoned").name)
        else:
            remove_folder(folder)
    if dropped:
        content = catalog.read(run_dir)
        steps = {catalog.step_of(folder) for folder in dropped}
        catalog.write(run_dir, dataclasses.replace(content, complete=[step for step in content.complete if step not in steps]))


def _checkpoint_before(config: RunConfig, spike: int, skipped: SkippedSamples) -> Path | None:
    """Return the newest complete checkpoint that is at least two steps older than a spike, or that of the fork; None without one."""
    run_dir = Path(config.run_dir)
    own = native.complete(run_dir)
    for folder in reversed(own):
        with suppress(DamagedCheckpointError):
            if native.step_of(folder) <= spike - 2 and not skipped.are_of(native.read_index(folder).train_state.samples):
                return folder
    if config.checkpoint.fork is None or own:
        return None
    return starting_checkpoint(run_dir, config.checkpoint)
