"""One progress bar for all ranks: the other ranks send their progress to rank 0."""

from __future__ import annotations

import time
from types import TracebackType

from pipeline.common.mpi import Comm
from pipeline.common.progress import Progress

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
