"""Signals that announce the end of a job."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from pipeline.common.errors import CONTINUE, INTERRUPTED, TERMINATED

#: The signals that this process has received: SIGUSR1, which slurm/pretrain.sbatch requests before the time limit, SIGTERM, which
#: scancel and preemption send, SIGHUP of a terminal that is closed, and SIGINT of Ctrl-C.
received: set[int] = set()

#: A second SIGINT counts after this time: a terminal sends Ctrl-C to a launcher and its ranks, and the launcher passes it on. Seconds.
_SAME_INTERRUPT = 1.0


def record(number: signal.Signals, then: Callable[[], None] = lambda: None) -> None:
    """Record a signal instead of ending the process, and call a function. Training then writes a checkpoint and stops."""

    def note(number: int, _: FrameType | None) -> None:
        received.add(number)
        then()

    signal.signal(number, note)


def record_end(then: Callable[[], None] = lambda: None) -> None:
    """Record SIGTERM, with a function that it calls, and SIGHUP; nohup ignores SIGHUP, and it stays ignored."""
    record(signal.SIGTERM, then)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        record(signal.SIGHUP)


def is_canceled() -> bool:
    """Whether the job was canceled or preempted, or its terminal was closed."""
    return not received.isdisjoint((signal.SIGTERM, signal.SIGHUP))


def exit_code() -> int | None:
    """The exit code of a process that stops because of a signal that it has received; None if there is none."""
    if is_canceled():
        return TERMINATED
    return INTERRUPTED if signal.SIGINT in received else CONTINUE if signal.SIGUSR1 in received else None


@contextmanager
def interrupt_recorded(message: str) -> Iterator[None]:
    """Record the first SIGINT of Ctrl-C while the block runs; a second one raises KeyboardInterrupt.

    A shell script starts its background jobs with SIGINT ignored, and it stays ignored.

    Args:
        message: printed at the first one, if it is not empty.
    """
    before, first = signal.getsignal(signal.SIGINT), 0.0

    def interrupt(number: int, _: FrameType | None) -> None:
        nonlocal first
        if number not in received:
            first = time.monotonic()
            received.add(number)
            with suppress(OSError):
                os.write(2, f"{message}\n".encode() if message else b"")  # the streams may be in use by what the signal interrupts
        elif time.monotonic() - first > _SAME_INTERRUPT:
            raise KeyboardInterrupt

    if before != signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
