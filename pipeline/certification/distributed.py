"""Local ranks on the CPU or the GPUs of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from pipeline.parallel import mesh as meshes

#: What takes a rank seconds to import is imported once, not once per rank.
PRELOAD = ["pipeline.certification.ranks_work"]


class RanksFailedError(Exception):
    """A local rank raised an exception, was killed, or did not end in time.

    Attributes:
        details: the traceback of the rank, empty without one.
    """

    def __init__(self, message: str, details: str = "") -> None:
        self.details = details
        super().__init__(message)


def preload() -> None:
    """Begin to import what the ranks need, in a server process that they are forked from. Returns at once."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    from multiprocessing import forkserver

    multiprocessing.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


def run_ranks(
    size: int,
    function: Callable[..., None],
    *arguments: object,
    seconds: float | None = None,
    watch: Callable[[], object] = lambda: None,
    gpus: bool = False,
) -> None:
    """Run `function(*arguments)` on ranks of this machine, over gloo without GPUs, or each on a GPU over NCCL.

    Args:
        function: importable by its name; so are the arguments' types.
        arguments: of the function.
        seconds: time limit; None for none.
        watch: called every second while they run.
        gpus: whether the ranks use GPUs.

    Raises:
        RanksFailedError: see there. No rank is left running.
    """
    if not gpus:
        preload()
    method = "spawn" if gpus else "forkserver"  # a process that looks for GPUs cannot fork others that use them
    with tempfile.TemporaryDirectory() as folder:
        context = start_processes(
            _serve_rank, (size, f"file://{folder}/store", function, arguments), nprocs=size, join=False, start_method=method
        )
        deadline = None if seconds is None else time.monotonic() + seconds
        try:
            while not context.join(1.0 if deadline is None else min(1.0, max(0.1, deadline - time.monotonic()))):
                watch()
                if deadline is not None and time.monotonic() > deadline:
                    raise RanksFailedError(f"the ranks did not finish within {seconds:g} s: one of them may wait for another forever")
        except (ProcessRaisedException, ProcessExitedException) as error:
            details = str(error).strip()
            lines = details.splitlines()
            reason = next((line.removeprefix("  - ") for line in lines if line.startswith("  - ")), lines[-1])  # of a UserError its problem
            raise RanksFailedError(f"rank {error.error_index}: {reason}", details) from None
        finally:
            for process in context.processes:
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGKILL)


def _serve_rank(rank: int, size: int, store: str, function: Callable[..., None], arguments: tuple[object, ...]) -> None:
    """Run one rank."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    meshes.init_distributed(rank, size, rank, store)
    function(*arguments)
    dist.barrier()
    meshes.destroy_process_group()


def _end_with_parent() -> None:
    """End this rank once the process that started it has ended: that may have been killed, and stopped no rank."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
