"""Ends a run that makes no progress, names the rank that the others wait for, and prints its stacks.

Each rank reports the phase that it is in, for example "step 12". A thread of each rank publishes the number of reports and a tick in the
store of the process group. When a rank has not reported for the set time, it compares all ranks: one whose ticks have stopped is suspended
or dead; otherwise the rank with the fewest reports is the slowest. If any rank has reported in the meantime, the run goes on. Time in which
a rank was suspended itself (`scontrol suspend`) does not count.

A node that loses its power closes no connection, and the others would wait for the set time. So rank 0 looks for stopped ticks after
SILENT_SECONDS without a report.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Any

import torch.distributed as dist

from pipeline.common import ends
from pipeline.parallel import mesh as meshes
from pipeline.parallel.mesh import INPUT_OUTPUT

log = logging.getLogger("pipeline")

#: Exit code of a run that the watchdog ends.
EXIT_CODE = 1
#: Time without a report after which rank 0 looks for ranks whose ticks have stopped, and for which they must have stopped, seconds.
SILENT_SECONDS = 30.0
#: The ranks that print their stacks if no single one is slowest.
_EXAMPLES = 4


class Watchdog:
    """A context in which this rank must report progress. Does nothing in a single process.

    Args:
        minutes: time without progress after which the run ends.
    """

    def __init__(self, minutes: float) -> None:
        self._timeout = minutes * 60
        self._interval = min(self._timeout / 20, 10.0)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._state: dict[str, Any] = {
            "host": socket.gethostname(),
            "node": ends.host_name(),
            "pid": os.getpid(),
            "reports": 0,
            "ticks": 0,
            "phase": "start",
        }
        self._waited, self._patience = 0.0, INPUT_OUTPUT  # seconds since a report, which the watching thread alone counts
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._requests = ThreadPoolExecutor(1, "watchdog-store")

    def report(self, phase: str, patience: float = 1.0) -> None:
        """Report progress.

        Args:
            phase: what this rank does next.
            patience: factor of the timeout for this phase.
        """
        self._state["phase"] = phase
        self._state["reports"] += 1
        self._patience = patience

    def __enter__(self) -> Watchdog:
        if self._size > 1:
            faulthandler.register(signal.SIGUSR2, all_threads=True)
            self._store = meshes.store_connection()
            self._publish()
            self._first = self._read(0)  # known even if its process, which may host the store, is suspended later
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._requests.shutdown(wait=False, cancel_futures=True)

    def _watch(self) -> None:
        """Publish this rank's state regularly, until its progress ends."""
        reports = 0
        while not self._ended.wait(self._interval):
            # Counted in intervals: the clock goes on while the process is suspended.
            self._waited = self._waited + self._interval if self._state["reports"] == reports else 0.0
            reports = self._state["reports"]
            if not self._answered(self._publish):
                self._end_without_store()
            if self._waited > self._timeout * self._patience:
                self._compare()
            elif self._rank == 0 and self._waited > SILENT_SECONDS * self._patience:
                self._find_silent()

    def _compare(self) -> None:
        """Find the rank that the others wait for, and end the run, unless it goes on in the meantime."""
        before = self._states()
        for _ in range(2):
            self._ended.wait(self._interval)
            self._answered(self._publish)
        after = self._states()
        if any(state["reports"] != before[rank]["reports"] for rank, state in after.items()):
            return
        if silent := {rank: state for rank, state in after.items() if state["ticks"] == before[rank]["ticks"]}:
            self._end(silent, "its process does not respond: suspended or dead")
        fewest = min(state["reports"] for state in after.values())
        slowest = {rank: state for rank, state in after.items() if state["reports"] == fewest}
        self._end(slowest, "it is the slowest" if len(slowest) < self._size else "all ranks wait in the same phase")

    def _find_silent(self) -> None:
        """End the run if the ticks of a rank have stopped, while this rank waits in the same phase."""
        before, reports = self._states(), self._state["reports"]
        for _ in range(round(SILENT_SECONDS / self._interval) + 1):
            if self._ended.wait(self._interval) or self._state["reports"] != reports:
                return
            self._waited += self._interval
            self._answered(self._publish)
        if silent := {rank: state for rank, state in self._states().items() if state["ticks"] == before[rank]["ticks"]}:
            self._end(silent, "its process does not respond: suspended or dead")

    def _states(self) -> dict[int, dict[str, Any]]:
        """The states of all ranks."""
        states: dict[int, dict[str, Any]] = {}
        if not self._answered(lambda: states.update({rank: self._read(rank) for rank in range(self._size)})):
            self._end_without_store()
        return states

    def _end_without_store(self) -> None:
        """End the run when the store does not answer. Rank 0 hosts it, except under torchrun, whose agent does."""
        self._end({0: self._first}, "the store of the job, which its process hosts, does not answer: suspended or dead")

    def _end(self, waited_for: dict[int, dict[str, Any]], reason: str) -> None:
        """Name the ranks that the others wait for, print their stacks, and exit. Does not return."""
        examples = dict(sorted(waited_for.items())[:_EXAMPLES])
        first = next(rank for rank in range(self._size) if rank not in waited_for or len(waited_for) == self._size)
        if self._rank == first:
            for rank, state in examples.items():
                where = f"rank {rank} (host {state['host']}, process {state['pid']}) in phase {state['phase']!r}"
                log.error("no progress for %.0f s: the run waits for %s: %s", self._waited, where, reason)
            rank, state = next(iter(examples.items()))
            blamed = {"rank": rank, "host": state["node"]} if len(waited_for) == 1 else {}
            ends.record(EXIT_CODE, f"no progress for {self._waited:.0f} s in phase {state['phase']!r}: {reason}", **blamed)
        if self._rank in examples:
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        for rank, state in examples.items():
            if rank != self._rank and state["host"] == self._state["host"]:
                _print_stacks(state["pid"])
        time.sleep(3)  # the launcher terminates all ranks when the first one exits
        os._exit(EXIT_CODE)

    def _publish(self) -> None:
        self._state["ticks"] += 1
        self._store.set(f"watchdog/{self._rank}", json.dumps(self._state))

    def _read(self, rank: int) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self._store.get(f"watchdog/{rank}"))
        return state

    def _answered(self, request: Callable[[], Any]) -> bool:
        """Whether the store answers a request in time; a suspended host of the store would block it for ever."""
        try:
            self._requests.submit(request).result(timeout=max(5.0, 3 * self._interval))
        except (FutureTimeoutError, dist.DistError):
            return False
        return True


def _print_stacks(process: int) -> None:
    """Let another process of this host print its stacks; one that is suspended continues for it."""
    try:
        os.kill(process, signal.SIGUSR2)
        os.kill(process, signal.SIGCONT)
    except OSError:  # it has exited
        return
