"""Progress reports: a progress bar on a terminal, plain lines in a log; one for all ranks, which send their progress to rank 0."""

from __future__ import annotations

import logging
import sys
import time
from datetime import timedelta
from types import TracebackType

from pipeline.common.mpi import Comm

log = logging.getLogger("pipeline")


def set_up_logging(rank: int, world_size: int) -> None:
    """Configure logging to standard error: time, rank if world_size > 1, message. Rank 0 logs at INFO, other ranks at WARNING."""
    prefix = f" [{rank}]" if world_size > 1 else ""
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING, format=f"%(asctime)s{prefix} %(message)s", datefmt="%H:%M:%S", force=True
    )


class Progress:
    """Reports completed units of work: a tqdm bar on a terminal, otherwise periodic log lines. Only rank 0 reports.

    Args:
        total: total number of units, None if unknown.
        unit: name of the unit; "B" counts bytes and prints MB.
        every: seconds between log lines without a terminal.
    """

    def __init__(self, total: int | None, label: str, unit: str, rank: int = 0, every: float = 30.0) -> None:
        self._label, self._unit, self._total, self._every = label, unit, total, every
        self._done, self._start, self._last = 0, time.monotonic(), time.monotonic()
        self._rank = rank
        self._bar = None
        if rank == 0 and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc=label, unit=unit, unit_scale=unit == "B", dynamic_ncols=True)

    def extend(self, amount: int) -> None:
        """Add units to the total, for work that turns out to be necessary."""
        self.expect((self._total or 0) + amount)

    def advance(self, amount: int = 1, note: str = "") -> None:
        """Add completed units; `note` is shown next to the bar."""
        self._done += amount
        if self._bar is not None:
            self._bar.set_postfix_str(note, refresh=False)
            self._bar.update(amount)
        elif self._rank == 0 and time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            log.info("%s: %s %s", self._label, self._rate(), note)

    def expect(self, total: int) -> None:
        """Correct the total number of units."""
        self._total = total
        if self._bar is not None:
            self._bar.total = total

    def _rate(self) -> str:
        scale, unit = (1e6, "MB") if self._unit == "B" else (1, self._unit)
        seconds = max(time.monotonic() - self._start, 1e-9)
        total = f" of {self._total / scale:,.0f}" if self._total else ""
        remaining = ""
        if self._total and 0 < self._done < self._total:
            remaining = f", {timedelta(seconds=round(seconds * (self._total / self._done - 1)))} left"
        return f"{self._done / scale:,.0f}{total} {unit}, {self._done / scale / seconds:,.1f} {unit}/s{remaining}"

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._rank == 0 and kind is None:
            log.info("%s: %s, done", self._label, self._rate())


_TAG = 77
_INTERVAL = 1.0
"""Seconds between two messages of a rank."""


class SharedProgress:
    """Counts the work of all ranks. Collective: all ranks enter and exit it together.

    Args:
        total: units of all ranks together.
        label, unit: as in Progress.
    """

    def __init__(self, comm: Comm, total: int, label: str, unit: str) -> None:
        self._comm = comm
        self._progress = Progress(total, label, unit, comm.rank)
        self._unsent, self._last_sent = 0, time.monotonic()
        self._running = comm.size - 1
        self._requests: list[object] = []  # the buffer of a message is freed with its request

    def advance(self, amount: int, note: str = "") -> None:
        """Count finished units of this rank; rank 0 shows its `note` next to the bar."""
        if self._comm.rank == 0:
            self._progress.advance(amount, note)
            while self._running and self._comm.iprobe(tag=_TAG):
                self._receive()
            return
        self._unsent += amount
        if time.monotonic() - self._last_sent >= _INTERVAL:
            self._send(ended=False)

    def _send(self, ended: bool) -> None:
        self._requests.append(self._comm.isend((self._unsent, ended), dest=0, tag=_TAG))
        self._unsent, self._last_sent = 0, time.monotonic()

    def _receive(self) -> None:
        amount, ended = self._comm.recv(tag=_TAG)
        self._running -= ended
        self._progress.advance(amount)

    def __enter__(self) -> SharedProgress:
        self._progress.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            if self._comm.rank > 0:
                self._send(ended=True)
            while self._running and self._comm.rank == 0:
                self._receive()
        self._progress.__exit__(kind, error, trace)
