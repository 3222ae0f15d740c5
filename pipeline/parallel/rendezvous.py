"""How the ranks of a job find each other: the store of rank 0, and a wait that names the missing ranks and that signals end."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store, TCPStore

from pipeline.common import ranks, signals
from pipeline.common.errors import RunFailed, ToBeContinued, UserError

log = logging.getLogger("pipeline")

#: Seconds between two lines about missing ranks, between two looks, by which others wait longer than rank 0; most ranks that a line names.
SAY, LOOK, LONGER, _NAMED = 30.0, 2.0, 10.0, 16


#: Stores that this process has opened, and the number of its meetings: the runs of a sweep, and the phases of a run, meet again.
_STORES: dict[tuple[str, str], TCPStore] = {}
_MEETINGS = itertools.count()


def meet(rank: int, world_size: int, local_rank: int, init_method: str, seconds: float) -> Store:
    """Wait until all ranks are there, and return the store that they share. A wait of the store itself would block signals.

    Args:
        rank, world_size, local_rank: of this process.
        init_method: `tcp://host:port` of rank 0, or `env://` under torchrun, whose agent may host the store.
        seconds: time limit.

    Raises:
        RunFailed: ranks are missing at the time limit, or rank 0 has ended; the message names them, and their hosts under Slurm.
        ToBeContinued: a signal announced the end of this job.
    """
    began = said = time.monotonic()

    def look(missing: Callable[[], str]) -> None:
        nonlocal said
        waited = time.monotonic() - began
        if (code := signals.exit_code()) is not None:
            raise ToBeContinued(code)
        if waited > seconds + (LONGER if rank else 0.0):
            raise RunFailed(f"ranks have not started within {seconds:.0f} s (half of training.timeout_minutes): {missing()}")
        if local_rank == 0 and time.monotonic() - said > SAY:
            said = time.monotonic()
            log.warning("waiting for %.0f s for %s", waited, missing())
        time.sleep(min(0.02 + waited / 5, LOOK))

    here = ranks.detect() if init_method == "env://" else None
    host, _, port = (f"{here.master_host}:{here.master_port}" if here else init_method.removeprefix("tcp://")).rpartition(":")
    serves = rank == 0 and not (here and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    while not serves and (problem := _unreachable(host, int(port))):
        look(lambda: f"rank 0 at {host}:{port}: {problem}")
    if (store := _STORES.get((host, port))) is None:
        store = _STORES[host, port] = TCPStore(host, int(port), None, serves, timedelta(seconds=seconds), wait_for_workers=False)
    joined = PrefixStore(f"meet/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_MEETINGS)}", store)
    try:
        joined.set(str(rank), "")
        if joined.add("count", 1) == world_size:
            joined.set("all", "")
        while not joined.check(["all"]):
            look(lambda: _named([other for other in range(world_size) if not joined.check([str(other)])]))
    except DistError as error:
        raise RunFailed(f"Connection closed by peer: rank 0 has ended before all ranks were there ({error})") from error
    return PrefixStore("of the ranks", joined)


def _unreachable(host: str, port: int) -> str:
    """Why nothing accepts connections there; empty if something does."""
    try:
        socket.create_connection((host, port), timeout=LOOK).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _named(missing: list[int]) -> str:
    """Ranks, with their hosts if Slurm tells them."""
    try:
        nodes, counts = ranks.expand_hosts(os.environ["SLURM_STEP_NODELIST"]), ranks.expand_tasks(os.environ["SLURM_STEP_TASKS_PER_NODE"])
        hosts = [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]
        named = [f"{rank} on {hosts[rank]}" for rank in missing[:_NAMED]]
    except (LookupError, UserError, ValueError):
        named = [str(rank) for rank in missing[:_NAMED]]
    return f"rank {', '.join(named)}{f' and {len(missing) - _NAMED} more' if len(missing) > _NAMED else ''}"
