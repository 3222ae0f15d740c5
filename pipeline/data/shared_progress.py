"""Progress of all ranks in one bar: the others tell rank 0 what they have done."""

from __future__ import annotations

import time
from types import TracebackType

from pipeline.data.mpi import Comm
from pipeline.progress import Progress

_TAG = 77
_EVERY = 1.0
"""Seconds between two messages of a rank."""


class SharedProgress:
    """Counts the work of all ranks; all ranks make one and end it together.

    Args:
        total: units of all ranks.
        label, unit: as of Progress.
    """

    def __init__(self, comm: Comm, total: int, label: str, unit: str) -> None:
        self._comm = comm
        self._progress = Progress(total, label, unit, comm.rank)
        self._untold, self._told = 0, time.monotonic()
        self._running = comm.size - 1
        self._requests: list[object] = []  # a message's buffer lives as long as its request

    def advance(self, amount: int, note: str = "") -> None:
        """Count finished units of this rank; `note` is shown beside the bar of rank 0."""
        if self._comm.rank == 0:
            self._progress.advance(amount, note)
            while self._running and self._comm.iprobe(tag=_TAG):
                self._receive()
            return
        self._untold += amount
        if time.monotonic() - self._told >= _EVERY:
            self._tell(ended=False)

    def _tell(self, ended: bool) -> None:
        self._requests.append(self._comm.isend((self._untold, ended), dest=0, tag=_TAG))
        self._untold, self._told = 0, time.monotonic()

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
                self._tell(ended=True)
            while self._running and self._comm.rank == 0:
                self._receive()
        self._progress.__exit__(kind, error, trace)
