"""Ends a run that makes no progress, names the rank that the others wait for, and prints its stacks.

Each rank reports the phase that it is in, for example "step 12". A thread of each rank publishes the number of reports and a tick in the
store of the process group. When no rank has reported for the set time, all are compared: one whose ticks have stopped is suspended or dead;
otherwise the rank with the fewest reports is the slowest. If any rank has reported in the meantime, the run goes on. Time in which a rank
was suspended itself (`scontrol suspend`) does not count. A few ranks
compare, as one store answers all, and the others wait for their result.

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
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import TracebackType
from typing import Any

import torch.distributed as dist

from pipeline.common import ends
from pipeline.parallel import flight_recorder
from pipeline.parallel import mesh as meshes
from pipeline.parallel.mesh import INPUT_OUTPUT

log = logging.getLogger("pipeline")

#: Exit code of a run that the watchdog ends.
EXIT_CODE = 1
#: Time without a report after which rank 0 looks for ranks whose ticks have stopped, and for which they must have stopped, seconds.
SILENT_SECONDS = 30.0
#: The ranks that print their stacks if no single one is slowest.
_EXAMPLES = 4
#: Number of ranks that compare all; further ones do after as many intervals without a result.
_READERS, _WAITED_INTERVALS = 8, 10
#: Key of the result, in the store.
_RESULT = "watchdog/result"


class Watchdog:
    """A context in which this rank must report progress within some minutes, or the run ends. Does nothing in a single process."""

    def __init__(self, minutes: float) -> None:
        self._timeout = minutes * 60
        self._interval = min(self._timeout / 20, 10.0)
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        self._state: dict[str, Any] = {
            "rank": self._rank,
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
            self._first = self._states([0])[0]  # known even if its process, which may host the store, is suspended later
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
                self._find_slowest()
            elif self._rank == 0 and self._waited > SILENT_SECONDS * self._patience:
                self._find_silent()

    def _find_slowest(self) -> None:
        """Find the rank that the others wait for, or wait for those that do, and end the run, unless it goes on in the meantime."""
        compares = self._rank in readers(self._size)
        if compares or self._waited > self._timeout * self._patience + _WAITED_INTERVALS * self._interval:
            self._compare()
        elif self._asked(lambda: self._store.check([_RESULT])):
            self._leave(json.loads(self._asked(lambda: self._store.get(_RESULT)))["examples"])

    def _compare(self) -> None:
        """Compare all ranks, and end the run, unless it goes on in the meantime."""
        before = self._all_states()
        for _ in range(2):
            self._ended.wait(self._interval)
            self._answered(self._publish)
        after = self._all_states()
        if any(now["reports"] != then["reports"] for now, then in zip(after, before, strict=True)):
            return
        if silent := _silent(before, after):
            self._end(silent, "its process does not respond: suspended or dead")
        fewest = min(state["reports"] for state in after)
        slowest = [state for state in after if state["reports"] == fewest]
        self._end(slowest, "it is the slowest" if len(slowest) < self._size else "all ranks wait in the same phase")

    def _find_silent(self) -> None:
        """End the run if the ticks of a rank have stopped, while this rank waits in the same phase."""
        before, reports = self._all_states(), self._state["reports"]
        for _ in range(round(SILENT_SECONDS / self._interval) + 1):
            if self._ended.wait(self._interval) or self._state["reports"] != reports:
                return
            self._waited += self._interval
            self._answered(self._publish)
        if silent := _silent(before, self._all_states()):
            self._end(silent, "its process does not respond: suspended or dead")

    def _all_states(self) -> list[dict[str, Any]]:
        """The states of all ranks."""
        return self._asked(lambda: self._states(range(self._size)))

    def _end_without_store(self) -> None:
        """End the run when the store does not answer. Rank 0 hosts it, except under torchrun, whose agent does."""
        reason = "the store of the job, which its process hosts, does not answer: suspended or dead"
        if self._rank == 1:
            self._name([self._first], 1, reason)
        self._leave([self._first])

    def _end(self, waited_for: list[dict[str, Any]], reason: str) -> None:
        """End the run: the first rank that has a result names the ranks that the others wait for. Does not return."""
        examples = waited_for[:_EXAMPLES]
        result = json.dumps({"examples": examples, "by": self._rank})
        first = self._asked(lambda: self._store.compare_set(_RESULT, "", result))
        if json.loads(first)["by"] == self._rank:
            self._name(examples, len(waited_for), reason)
        self._leave(examples)

    def _name(self, examples: list[dict[str, Any]], count: int, reason: str) -> None:
        """Log and record the ranks that the others wait for."""
        for state in examples:
            where = f"rank {state['rank']} (host {state['host']}, process {state['pid']}) in phase {state['phase']!r}"
            log.error("no progress for %.0f s: the run waits for %s: %s", self._waited, where, reason)
        state = examples[0]
        blamed = {"rank": state["rank"], "host": state["node"]} if count == 1 else {}
        ends.record(EXIT_CODE, f"no progress for {self._waited:.0f} s in phase {state['phase']!r}: {reason}", **blamed)

    def _leave(self, examples: list[dict[str, Any]]) -> None:
        """Print the stacks of the ranks that the others wait for, on their hosts, write the collectives of this one, and exit."""
        for state in examples:
            if state["rank"] == self._rank:
                faulthandler.dump_traceback(sys.stderr, all_threads=True)
            elif state["host"] == self._state["host"]:
                _print_stacks(state["pid"])
        flight_recorder.dump(self._rank)
        time.sleep(3)  # the launcher terminates all ranks when the first one exits
        os._exit(EXIT_CODE)

    def _publish(self) -> None:
        self._state["ticks"] += 1
        self._store.set(f"watchdog/{self._rank}", json.dumps(self._state))

    def _states(self, ranks: Iterable[int]) -> list[dict[str, Any]]:
        """The states of some ranks, by one request."""
        return [json.loads(state) for state in self._store.multi_get([f"watchdog/{rank}" for rank in ranks])]

    def _asked(self, request: Callable[[], Any]) -> Any:
        """The answer of the store; ends the run if there is none."""
        answers: list[Any] = []
        if not self._answered(lambda: answers.append(request())):
            self._end_without_store()
        return answers[0]

    def _answered(self, request: Callable[[], Any]) -> bool:
        """Whether the store answers a request in time; a suspended host of the store would block it for ever."""
        try:
            self._requests.submit(request).result(timeout=max(5.0, 3 * self._interval))
        except (FutureTimeoutError, dist.DistError):
            return False
        return True


def readers(size: int) -> range:
    """The ranks that compare all ranks of a job, on several of its nodes."""
    return range(0, size, -(-size // _READERS))


def _silent(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The states of the ranks whose ticks have stopped."""
    return [now for now, then in zip(after, before, strict=True) if now["ticks"] == then["ticks"]]


def _print_stacks(process: int) -> None:
    """Let another process of this host print its stacks; one that is suspended continues for it."""
    try:
        os.kill(process, signal.SIGUSR2)
        os.kill(process, signal.SIGCONT)
    except OSError:  # it has exited
        return
