"""Decides after each step, identically on all ranks, whether to save a checkpoint, to stop, or to give up.

Signals arrive at different ranks at different moments, and clocks differ. Each rank therefore sends its requests with the loss of a step,
which is summed over all ranks, and acts on the sum of the previous step: the host does not wait for the step that it has just queued.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from pipeline.common import signals
from pipeline.common.errors import CONTINUE, INTERRUPTED, NEXT_PHASE, TERMINATED, ToBeContinued, UserError
from pipeline.common.ranks import Ranks
from pipeline.config import layouts, phases
from pipeline.config.rules import check
from pipeline.config.schema import RunConfig
from pipeline.training.callback import REQUESTS, Callback, Decision, Step
from pipeline.training.gradient_clipping import SkippedSteps
from pipeline.training.request_files import RequestFiles

log = logging.getLogger("pipeline")


class StepControl(Callback):
    """Turns the requests of all ranks into decisions, and ends the job.

    Args:
        rank: the clock of rank 0 decides when a checkpoint is due, and rank 0 looks for files by which a user asks for something.
        last_step: number of steps after which this job ends, since the run needs other nodes; None if it trains up to training.steps.
        phase_end: number of steps at the end of this phase of training.phases; None in the last one.
    """

    def __init__(self, config: RunConfig, rank: int, last_step: int | None = None, phase_end: int | None = None) -> None:
        self._rank, self._phase_end = rank, phase_end
        self._save_seconds = config.checkpoint.every_minutes * 60
        self._saved = time.monotonic()
        self._skipped = SkippedSteps(config.training.max_skipped_steps)
        self._files = RequestFiles(Path(config.run_dir)) if rank == 0 else None
        self._last_step = last_step
        self._pending: HostCopy | None = None
        self._has_saved = False

    def requests(self) -> Collection[str]:
        """See Callback: those of the clock, of signals and of files."""
        due = self._rank == 0 and self._save_seconds > 0 and time.monotonic() - self._saved >= self._save_seconds
        save, stop = (False, False) if self._files is None else self._files.look()
        time_ends, interrupted = (number in signals.received for number in (signal.SIGUSR1, signal.SIGINT))
        made = {"save": due or save, "time": time_ends, "canceled": signals.is_canceled(), "interrupted": interrupted, "stop": stop}
        return [name for name, is_made in made.items() if is_made]

    def after_step(self, step: Step) -> None:
        """Decide on the requests of the previous step; of this step, too, if it is the last one.

        Raises:
            UserError: too many steps in a row were skipped.
        """
        result = step.result
        previous, self._pending = self._pending, HostCopy(torch.stack([*result.requests, result.skipped.to(result.requests)]))
        known = [copy.values() for copy in (previous, self._pending if step.last else None) if copy is not None]
        for *_, skipped in known:
            self._skipped.count(skipped=bool(skipped))
        made = {name for counts in known for name, count in zip(REQUESTS, counts, strict=False) if count}
        stop, reason = None, ""
        if "canceled" in made:
            stop = TERMINATED
        elif "interrupted" in made:
            stop = INTERRUPTED
        elif "time" in made or "stop" in made:
            stop = CONTINUE
        if stop is None and step.state.step in (self._last_step, self._phase_end) and not step.last:
            stop, reason = CONTINUE, "phase" if step.state.step == self._last_step else NEXT_PHASE
        if "stop" in made:
            reason = "stop"
        save = "save" in made and not self._has_saved
        self._has_saved = self._has_saved and not known
        step.decision = Decision(save, stop, reason, "failed" in made, "fatal" in made, "rewind" in made)

    def wants_save(self, step: Step) -> bool:
        """See Callback."""
        return step.decision.save or step.decision.stop is not None

    def save(self, step: Step) -> None:
        """Note that a checkpoint has begun: the next one by the clock, or by a request of this step, is not due."""
        self._saved, self._has_saved = time.monotonic(), True
        if self._files is not None:
            self._files.saving(step.state.step)

    def complete(self, step: int) -> None:
        """Note that the checkpoint of a step is complete."""
        if self._files is not None:
            self._files.complete(step)

    def end(self, step: Step) -> None:
        """End the job, whose checkpoint is complete.

        Raises:
            ToBeContinued: the run is not complete.
        """
        if self._files is not None:
            self._files.stopped()
        if step.decision.stop is not None and not step.last:
            if step.decision.reason == NEXT_PHASE:
                log.info("step %d ends a phase of training.phases", step.state.step)
            else:
                other = " on other nodes" if step.state.step == self._last_step else ""
                log.info("stopped after step %d; the same command continues%s", step.state.step, other)
            raise ToBeContinued(step.decision.stop, step.decision.reason)


class HostCopy:
    """A small tensor that is copied to the host without waiting for the device."""

    def __init__(self, tensor: Tensor) -> None:
        self._values, self._ready = tensor.detach(), None
        if tensor.is_cuda:
            self._values = tensor.to("cpu", non_blocking=True)
            self._ready = torch.cuda.Event()
            self._ready.record()

    def values(self) -> list[float]:
        """Wait for the copy and return its elements."""
        if self._ready is not None:
            self._ready.synchronize()
        elements: list[float] = self._values.tolist()
        return elements


def last_step(config: RunConfig, step: int, ranks: Ranks) -> int | None:
    """Return the number of steps after which this job, which begins after `step`, ends for other nodes; None if it trains to the end.

    A job that has the nodes of the next phase already, and whose layout is legal there, goes on.

    Raises:
        UserError: the layout does not divide the batches of the phase that begins.
    """
    if not layouts.has_phases(config.training):
        return None
    UserError.raise_for(check.size_violations(config, ranks.world_size, step))
    nodes, end = -(-ranks.world_size // ranks.local_size), layouts.phase_end(config, step)
    while end is not None:
        if layouts.nodes_of_phase(config, end) != nodes or check.size_violations(phases.at(config, end), ranks.world_size, end):
            return end
        end = layouts.phase_end(config, end)
    return None
