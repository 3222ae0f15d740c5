"""The return of a run to the newest checkpoint before a loss spike, without the samples from there to the end of the spike.

As in PaLM (Chowdhery et al. 2022, section 5.1): the samples seen before and during the spike are skipped, since spikes come from a
combination of certain batches and a certain state of the weights. Everything follows from skipped_samples.json, written first: a job
that is killed then leaves checkpoints of the abandoned steps, which the next one removes before it chooses where to start.

A loss spike is found on rank 0 by a robust rule on losses and gradient norms. Their limit is median + factor * s of the last steps, with s
= 1.4826 * MAD, the median absolute deviation from the median. This is the Hampel identifier (Leys et al. 2013, "Detecting outliers");
1.4826 = 1 / quantile(3/4) of the normal distribution makes s its standard deviation. Unlike mean and standard deviation, neither moves
with outliers as long as they are fewer than half of the values. Losses and norms are compared by their logarithms, since norms vary by
factors. A loss that falls keeps the median above it, so that a trend raises no alarm.

The window ends before the steps that are judged: whether there is a spike is a function of the last window + patience steps alone, and a
run that continues from a checkpoint decides as one that was never interrupted.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from pipeline.checkpoint import catalog, native
from pipeline.checkpoint.native import TrainState
from pipeline.common import events, metrics_file
from pipeline.common.atomic_files import remove_folder
from pipeline.common.errors import DamagedCheckpointError, UserError
from pipeline.config import warmup
from pipeline.config.schema import RunConfig
from pipeline.config.training import TrainingConfig
from pipeline.data.load.objectives.objective import Objective
from pipeline.parallel.mesh import on_rank_0
from pipeline.training import resume, skipped_samples
from pipeline.training.callback import Callback, Step
from pipeline.training.metrics import Metrics
from pipeline.training.saves import Saves
from pipeline.training.skipped_samples import Rewind, SkippedSamples
from pipeline.training.starting_checkpoint import FORK, starting_checkpoint
from pipeline.training.trainer import Trainer

log = logging.getLogger("pipeline")


#: Steps from the last one of a spike to the step after which all ranks act on it: rank 0 reads the metrics of a step when the next one is
#: queued, sends its request with the one after that, and its sum is read when a further one is queued.
DELAY = 3
#: Standard deviations of normally distributed values in their median absolute deviation.
_NORMAL = 1.4826
#: Least standard deviation of a logarithm: a thousandth of the value.
_LEAST = 1e-3


@dataclass(frozen=True)
class Spike:
    """A loss spike.

    Attributes:
        first: its first step; the first step of a run is 1.
        last: the step at which it was long enough.
        reason: its quantity, with the value at the first step and the limit.
    """

    first: int
    last: int
    reason: str


class LossSpikes:
    """Finds the first loss spike: training.spike_patience steps in a row whose loss or gradient norm is above its limit, or not finite.

    Args:
        training: with spike_factor, spike_window and spike_patience.
        earliest: spikes that begin before this step are ignored, since no checkpoint precedes them.
        scaled: the loss is scaled (fp16): a gradient that is not finite changes the scale and is no spike.

    Attributes:
        found: the first spike, None if there is none.
    """

    def __init__(self, training: TrainingConfig, earliest: int = 0, *, scaled: bool = False) -> None:
        self._factor, self._window, self._patience = training.spike_factor, training.spike_window, training.spike_patience
        self._earliest, self._scaled = earliest, scaled
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=self._window + self._patience)
        self.found: Spike | None = None

    def restore(self, run_dir: Path) -> None:
        """Observe the last steps of metrics.jsonl, as many as decide about the spikes on which the run has not acted yet."""
        for content in metrics_file.last_with(run_dir, "grad_norm", self._window + self._patience + DELAY):
            self.observe(content)

    def observe(self, line: Mapping[str, Any]) -> None:
        """Take note of a step.

        Args:
            line: of metrics.jsonl, with step, loss and grad_norm (None or NaN if they are not finite); empty for none.
        """
        if not line or (self._steps and line["step"] <= self._steps[-1][0]):
            return
        step = int(line["step"])
        if self._steps and step != self._steps[-1][0] + 1:  # a gap in the file
            self._steps.clear()
        norm = _logarithm(line["grad_norm"])
        self._steps.append((step, _logarithm(line["loss"]), -math.inf if self._scaled and norm == math.inf else norm))
        if self.found is None and len(self._steps) == self._steps.maxlen:
            self.found = self._judge()

    def _judge(self) -> Spike | None:
        """Return the spike that the last `patience` steps are, None if they are none."""
        steps = list(self._steps)
        before, last = steps[: self._window], steps[self._window :]
        limits = [self._limit([step[quantity] for step in before]) for quantity in (1, 2)]
        if last[0][0] < self._earliest or not all(loss > limits[0] or norm > limits[1] for _, loss, norm in last):
            return None
        step, *values = last[0]
        which = 0 if values[0] > limits[0] else 1
        name, value, limit = ("loss", "gradient norm")[which], math.exp(values[which]), math.exp(limits[which])
        return Spike(step, last[-1][0], f"{name} {value:.4g} above {limit:.4g}" if math.isfinite(value) else f"{name} not finite")

    def _limit(self, logarithms: Iterable[float]) -> float:
        """Return the limit of a logarithm; infinity if fewer than half of the window are finite."""
        finite = [value for value in logarithms if math.isfinite(value)]
        if 2 * len(finite) < self._window:
            return math.inf
        middle = median(finite)
        return middle + self._factor * max(_NORMAL * median(abs(value - middle) for value in finite), _LEAST)


def _logarithm(value: float | None) -> float:
    """The logarithm, infinity of a value that is not finite, minus infinity of one that is not positive."""
    if value is None or not math.isfinite(value):
        return math.inf
    return math.log(value) if value > 0 else -math.inf


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
        spiked: bool = on_rank_0(lambda: self._spikes.found is not None)
        return spiked


def train(
    config: RunConfig, trainer: Trainer, data: Objective, state: TrainState, attempt: Callable[[TrainState, SkippedSamples], TrainState]
) -> TrainState:
    """Train, from an older checkpoint after every loss spike; every rank calls this.

    Args:
        trainer: its model and optimizer are in the state `state`.
        attempt: trains from a state without the samples that are skipped, and returns the final state.

    Raises:
        UserError: as of rewind. Other errors are those of an attempt.
    """
    skipped = on_rank_0(lambda: skipped_samples.read(Path(config.run_dir)))
    for entry in skipped.rewinds if dist.get_rank() == 0 else ():
        log.info("%s: without samples %d to %d (%s)", skipped_samples.FILE, entry.first, entry.last - 1, entry.reason)
    while True:
        try:
            return attempt(state, skipped)
        except SpikeFoundError as spike:
            error = spike
        path, skipped = on_rank_0(partial(rewind, config, error, skipped))
        state = resume.begin(config, trainer, path, data)


def rewind(config: RunConfig, error: SpikeFoundError, skipped: SkippedSamples) -> tuple[Path, SkippedSamples]:
    """Record a rewind after a loss spike and remove the checkpoints of the abandoned steps. Only rank 0 calls this.

    The checkpoint is at least two steps older than the first step of the spike: the step after it had a normal loss with its weights.

    Returns:
        The checkpoint to continue from, and the samples that are skipped from now on.

    Raises:
        UserError: training.max_rewinds is reached, or there is no such checkpoint.
    """
    run_dir, training, spike = Path(config.run_dir), config.training, error.spike
    assert spike is not None, "rank 0 has the spike"
    finding = f"the loss spiked at step {spike.first} ({spike.reason}; {training.spike_patience} steps in a row)"
    if len(skipped.rewinds) >= training.max_rewinds:
        rule = f"{finding}, after {len(skipped.rewinds)} rewinds of this run; {skipped_samples.FILE} lists them"
        fix = "reduce optimizer.lr or look at these samples; raise it to skip more of them, or continue with training.spike_factor=0"
        raise UserError.of("training.max_rewinds", training.max_rewinds, rule, fix)
    checkpoint = _checkpoint_before(config, spike.first, skipped)
    if checkpoint is None:
        rule = f"{finding}, and no checkpoint of a step up to {spike.first - 2} is left to return to"
        raise UserError.of("training.spike_factor", training.spike_factor, rule, "raise checkpoint.keep, or set training.spike_factor=0")
    start = native.read_index(checkpoint).train_state
    last = error.state.samples
    for step in range(error.state.step, spike.last + DELAY):  # the same end, whenever an interrupted run learns of the spike
        last = skipped.after(last, warmup.batch_size(training, step))
    entry = Rewind(start.step, spike.first, spike.reason, start.samples, last)
    more = SkippedSamples([*skipped.rewinds, entry])
    count = len(more.rewinds)
    # Before the list: a job that is killed between them records the event twice, and none is missing.
    seconds = round(metrics_file.seconds_after(run_dir, start.step), 3)
    events.record(run_dir, "rewind", step=error.state.step, number=count, seconds=seconds, **dataclasses.asdict(entry))
    skipped_samples.write(run_dir, more)
    text = "%s: back to %s, without samples %d to %d (rewind %d of training.max_rewinds=%d)"
    log.warning(text, finding, checkpoint, entry.first, entry.last - 1, count, training.max_rewinds)
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
    complete = native.complete(run_dir)
    for folder in reversed(complete):
        with suppress(DamagedCheckpointError):
            if native.step_of(folder) <= spike - 2 and not skipped.are_of(native.read_index(folder).train_state.samples):
                return folder
    if config.checkpoint.fork is None or complete:
        return None
    return starting_checkpoint(run_dir, config.checkpoint)
