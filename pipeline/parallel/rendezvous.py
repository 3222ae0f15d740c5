"""How the ranks of a job find each other: the store of rank 0, and a wait that names the missing ranks and that signals end."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from pipeline.common import ranks, signals
from pipeline.common.errors import RunFailed, ToBeContinued, UserError

log = logging.getLogger("pipeline")

#: Seconds between two lines about ranks that are missing, and between two looks at most; by how many others wait longer than rank 0.
SAY, LOOK, LONGER = 30.0, 1.0, 10.0
#: Most ranks that a line names.
_NAMED = 16


def meet(rank: int, world_size: int, local_rank: int, init_method: str, seconds: float) -> Store:
    """Wait until all ranks are there, and return the store that they share.

    Args:
        rank, world_size, local_rank: of this process.
        init_method: `tcp://host:port` of rank 0, or `env://` under torchrun, whose agent may host the store.
        seconds: time limit.

    Raises:
        RunFailed: ranks are missing at the time limit; the message names them, and their hosts under Slurm.
        ToBeContinued: a signal announced the end of this job.
    """
    wait = _Wait(rank, local_rank, seconds)
    here = ranks.detect() if init_method == "env://" else None
    host, _, port = (f"{here.master_host}:{here.master_port}" if here else init_method.removeprefix("tcp://")).rpartition(":")
    hosts_it = rank == 0 and not (here and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    while not hosts_it and (problem := _unreachable(host, int(port))):
        wait.look(lambda: f"rank 0 at {host}:{port}: {problem}")
        time.sleep(LOOK)
    store = TCPStore(host, int(port), None, hosts_it, timedelta(seconds=seconds), wait_for_workers=False)
    joined = PrefixStore(f"meet/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    joined.set(str(rank), "")
    if joined.add("count", 1) == world_size:
        joined.set("all", "")
    pause = 0.02
    try:
        while not joined.check(["all"]):  # a wait of the store would block signals, and log each of its time limits
            wait.look(lambda: _missing([other for other in range(world_size) if not joined.check([str(other)])]))
            time.sleep(pause)
            pause = min(1.2 * pause, 2 * LOOK)
    except DistError as error:
        raise RunFailed(f"Connection closed by peer: rank 0 has ended before all ranks were there ({error})") from error
    return PrefixStore("of the ranks", joined)


class _Wait:
    """Says what a rank waits for, and ends the wait."""

    def __init__(self, rank: int, local_rank: int, seconds: float) -> None:
        self._speaks, self._seconds = local_rank == 0, seconds
        self._began = self._said = time.monotonic()
        self._end = self._began + seconds + (LONGER if rank else 0.0)

    def look(self, missing: Callable[[], str]) -> None:
        """Say what is missing, every SAY seconds; raises as meet()."""
        if (code := signals.exit_code()) is not None:
            raise ToBeContinued(code)
        now = time.monotonic()
        if now > self._end:
            raise RunFailed(f"ranks have not started within {self._seconds:.0f} s (half of training.timeout_minutes): {missing()}")
        if self._speaks and now - self._said > SAY:
            self._said = now
            log.warning("waiting for %.0f s for %s", now - self._began, missing())


def _unreachable(host: str, port: int) -> str:
    """Why nothing accepts connections there; empty if something does."""
    try:
        socket.create_connection((host, port), timeout=2 * LOOK).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _missing(missing: list[int]) -> str:
    """The ranks that are missing, with their hosts if Slurm tells them."""
    try:
        nodes = ranks.expand_hosts(os.environ["SLURM_STEP_NODELIST"])
        counts = ranks.expand_tasks(os.environ["SLURM_STEP_TASKS_PER_NODE"])
        hosts = [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]
    except (KeyError, UserError, ValueError):
        hosts = []
    named = [f"{rank} on {hosts[rank]}" if rank < len(hosts) else str(rank) for rank in missing[:_NAMED]]
    return f"rank {', '.join(named)}{f' and {len(missing) - _NAMED} more' if len(missing) > _NAMED else ''}"
