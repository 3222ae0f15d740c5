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
from pipeline.common.errors import CONTINUE, TERMINATED
from pipeline.training.engine import StepResult
from pipeline.training.skipped_steps import SkippedSteps

log = logging.getLogger("pipeline")


@dataclass(frozen=True)
class Decision:
    """What all ranks do after a step.

    Attributes:
        save: write a checkpoint.
        stop: exit code of the run, which stops after writing a checkpoint; None if it goes on.
        failed: a rank could not write its part of a checkpoint.
        fatal: the run must end with an error, whose reason a rank knows.
        rewind: the loss has spiked: the run returns to a checkpoint.
    """

    save: bool = False
    stop: int | None = None
    failed: bool = False
    fatal: bool = False
    rewind: bool = False


class StepControl:
    """Collects the requests of this rank and turns those of all ranks into decisions.

    Args:
        rank: the clock of rank 0 decides when a checkpoint is due.
        save_minutes: checkpoint.every_minutes.
        max_skipped: training.max_skipped_steps.
    """

    def __init__(self, rank: int, save_minutes: float, max_skipped: int) -> None:
        self._rank = rank
        self._save_seconds = save_minutes * 60
        self._saved = time.monotonic()
        self._skipped = SkippedSteps(max_skipped)
        self._pending: HostCopy | None = None

    def requests(self, *, failed: bool = False, fatal: bool = False, rewind: bool = False) -> tuple[bool, ...]:
        """This rank's requests: (save a checkpoint, stop because the time ends, because the job was canceled, failed, fatal, rewind).

        Args:
            failed: this rank could not write its part of a checkpoint.
            fatal: the run must end with an error.
            rewind: the loss has spiked; rank 0 knows.
        """
        due = self._rank == 0 and self._save_seconds > 0 and time.monotonic() - self._saved >= self._save_seconds
        return due, signal.SIGUSR1 in signals.received, signal.SIGTERM in signals.received, failed, fatal, rewind

    def saved(self) -> None:
        """Note that a checkpoint was saved."""
        self._saved = time.monotonic()

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
        due, time_ends, canceled, failed, fatal, rewind = (any(values) for values in list(zip(*known, strict=True))[:6])
        return Decision(due, TERMINATED if canceled else CONTINUE if time_ends else None, failed, fatal, rewind)


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
