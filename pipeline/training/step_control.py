"""Decides after each step, identically on all ranks, whether to save a checkpoint, to stop, or to give up.

Signals arrive at different ranks at different moments, and clocks differ. Each rank therefore sends its requests with the loss of a step,
which is summed over all ranks, and acts on the sum of the previous step: the host does not wait for the step that it has just queued.
"""

from __future__ import annotations

import logging
import signal
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.common import signals
from pipeline.common.errors import CONTINUE, INTERRUPTED, TERMINATED
from pipeline.training.engine import StepResult
from pipeline.training.request_files import RequestFiles
from pipeline.training.skipped_steps import SkippedSteps

log = logging.getLogger("pipeline")


@dataclass(frozen=True)
class Decision:
    """What all ranks do after a step.

    Attributes:
        save: write a checkpoint.
        stop: exit code of the run, which stops after writing a checkpoint; None if it goes on.
        asked: a user asked it to stop, by the file `stop`.
        failed: a rank could not write its part of a checkpoint.
        fatal: the run must end with an error, whose reason a rank knows.
        rewind: the loss has spiked: the run returns to a checkpoint.
    """

    save: bool = False
    stop: int | None = None
    asked: bool = False
    failed: bool = False
    fatal: bool = False
    rewind: bool = False


class StepControl:
    """Collects the requests of this rank and turns those of all ranks into decisions.

    Args:
        rank: the clock of rank 0 decides when a checkpoint is due.
        save_minutes: checkpoint.every_minutes.
        max_skipped: training.max_skipped_steps.
        files: by which a user asks for something; rank 0 looks for them.
    """

    def __init__(self, rank: int, save_minutes: float, max_skipped: int, files: RequestFiles | None = None) -> None:
        self._rank = rank
        self._save_seconds = save_minutes * 60
        self._saved = time.monotonic()
        self._skipped = SkippedSteps(max_skipped)
        self._files = files if rank == 0 else None
        self._pending: HostCopy | None = None
        self._has_saved = False

    def requests(self, *, failed: bool = False, fatal: bool = False, rewind: bool = False) -> tuple[bool, ...]:
        """This rank's requests.

        They are: save a checkpoint, stop as the time ends, stop as the job was canceled, stop by Ctrl-C, stop by a file, failed, fatal,
        rewind.

        Args:
            failed: this rank could not write its part of a checkpoint.
            fatal: the run must end with an error.
            rewind: the loss has spiked; rank 0 knows.
        """
        due = self._rank == 0 and self._save_seconds > 0 and time.monotonic() - self._saved >= self._save_seconds
        save, stop = (False, False) if self._files is None else self._files.look()
        time_ends, interrupted = (number in signals.received for number in (signal.SIGUSR1, signal.SIGINT))
        return due or save, time_ends, signals.is_canceled(), interrupted, stop, failed, fatal, rewind

    def saving(self, step: int) -> None:
        """Note that the checkpoint of a step has begun, which all requests until now asked for."""
        self._saved, self._has_saved = time.monotonic(), True
        if self._files is not None:
            self._files.saving(step)

    def complete(self, step: int) -> None:
        """Note the step of the newest complete checkpoint that this rank knows of."""
        if self._files is not None:
            self._files.complete(step)

    def stopped(self) -> None:
        """Note that the run ends, and its checkpoint is complete."""
        if self._files is not None:
            self._files.stopped()

    def after_step(self, result: StepResult, *, last: bool) -> Decision:
        """Decide on the requests of the previous step; of this step, too, if it is the last one.

        Args:
            result: of this step, to which this rank sent requests().
            last: whether no step follows.

        Raises:
            UserError: too many steps in a row were skipped.
        """
        previous, self._pending = self._pending, HostCopy(torch.stack([*result.requests, result.skipped.to(result.requests)]))
        known = [copy.values() for copy in (previous, self._pending if last else None) if copy is not None]
        for *_, skipped in known:
            self._skipped.count(skipped=bool(skipped))
        if not known:
            return Decision()
        due, time_ends, canceled, interrupted, asked, failed, fatal, rewind, _ = (any(values) for values in zip(*known, strict=True))
        due, self._has_saved = due and not self._has_saved, False
        stop = TERMINATED if canceled else INTERRUPTED if interrupted else CONTINUE if time_ends or asked else None
        return Decision(due, stop, asked, failed, fatal, rewind)


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
