"""The MPI operations that the data stages need. A single process does not need MPI."""

from __future__ import annotations

import fcntl
import heapq
import os
import re
import signal
import stat
import sys
import termios
import time
import traceback
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np

from pipeline.common.atomic_files import report_disk_full
from pipeline.common.errors import CheckFailed, UserError
from pipeline.common.ranks import Ranks

MESSAGE_BYTES = 64 << 20
"""Bytes that a rank sends in one round of an exchange: MPI before version 4 counts in 31 bits, and a round is in memory twice."""


class Comm(Protocol):
    """The subset of the mpi4py communicator interface that the data stages use."""

    rank: int
    size: int

    @property
    def isend(self) -> Any:
        """Sends a value without blocking; returns a request that the caller must keep."""

    @property
    def recv(self) -> Any:
        """Blocks until a value from any rank arrives, and returns it."""

    @property
    def iprobe(self) -> Any:
        """Returns whether a value is ready to be received."""

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the root's value on every rank."""

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Return the values of all ranks on the root, None on the other ranks."""

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on every rank."""

    def alltoall(self, values: Sequence[Any]) -> list[Any]:
        """Send one value to every rank; return one value from every rank."""

    def barrier(self) -> None:
        """Wait for all ranks."""


class SingleProcessComm:
    """The communicator of a single process."""

    rank, size = 0, 1
    isend = recv = iprobe = None  # never called: there are no other ranks

    def bcast(self, value: Any, root: int = 0) -> Any:  # noqa: ARG002
        """Return the value."""
        return value

    def gather(self, value: Any, root: int = 0) -> list[Any]:  # noqa: ARG002
        """Return the value in a list."""
        return [value]

    def allgather(self, value: Any) -> list[Any]:
        """Return the value in a list."""
        return [value]

    def alltoall(self, values: Sequence[Any]) -> list[Any]:
        """Return the values: the process sends to itself."""
        return list(values)

    def barrier(self) -> None:
        """Return immediately."""


def share_cores(ranks: Ranks) -> None:
    """Limit the threads of libraries (tokenizers, rensa) to this rank's share of the cores. Call this before their first use."""
    cores = min(len(os.sched_getaffinity(0)), max(1, (os.cpu_count() or 1) // ranks.local_size))
    os.environ.setdefault("RAYON_NUM_THREADS", str(cores))


@contextmanager
def world(ranks: Ranks, output: Path) -> Iterator[Comm]:
    """Provide the communicator of all ranks. An error on one rank inside the block aborts the job, so that no other rank waits forever.

    Args:
        output: the output folder, named in the message when its disk is full.

    Raises:
        UserError: MPI and the launcher disagree about the number of ranks.
    """
    if ranks.world_size == 1:
        with report_disk_full(output):
            yield SingleProcessComm()
        return
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if comm.size != ranks.world_size:
        # With a mismatched PMI every process sees a world of one rank, and all would write the same files.
        raise UserError.of(
            "world size",
            ranks.world_size,
            f"{ranks.launcher} started {ranks.world_size} ranks, MPI sees {comm.size}",
            "start data stages with the mpirun of the MPI that mpi4py was built with, or with srun --mpi=pmi2",
        )
    _remove_names_of_shared_memory(comm)
    try:
        with report_disk_full(output):
            yield comm
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            code = 128 + signal.SIGINT
            message = "interrupted; run the same command again to continue" if comm.rank == 0 else ""
        else:
            expected = isinstance(error, UserError | CheckFailed)
            message, code = str(error) if expected else traceback.format_exc(), 2 if isinstance(error, UserError) else 1
        print(message, file=sys.stderr, flush=True)
        _wait_for_reader(sys.stderr)
        comm.Abort(code)
        os._exit(code)  # MPICH's Abort returns; a normal exit would report the error again and block in MPI_Finalize


def _remove_names_of_shared_memory(comm: Comm) -> None:
    """Remove the files of MPICH's shared memory, which the ranks of a node have mapped.

    Their names are of job and step. Killed ranks would leave them, and the same job, requeued to the node, wait in MPI_Init for ever.
    """
    comm.barrier()
    for name in set(re.findall(r"/dev/shm/mpich_shm_\w+", Path("/proc/self/maps").read_text(errors="replace"))):
        Path(name).unlink(missing_ok=True)


def _wait_for_reader(stream: TextIO, seconds: float = 5.0) -> None:
    """Wait until the launcher has read the pipe: after Abort, mpirun exits immediately and drops unread output."""
    if not stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
        return
    unread, deadline = array("i", [0]), time.monotonic() + seconds
    while time.monotonic() < deadline:
        fcntl.ioctl(stream.fileno(), termios.FIONREAD, unread)
        if not unread[0]:
            return
        time.sleep(0.01)


def balanced(sizes: Sequence[float], rank: int, ranks: int) -> list[int]:
    """Return the pieces of work of one rank, by number. The largest is assigned first, each to the rank with the smallest load so far."""
    loads = [(0.0, number) for number in range(ranks)]
    mine = []
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + sizes[piece], owner))
        if owner == rank:
            mine.append(piece)
    return mine


def exchange(comm: Comm, rows: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Send every row to the rank that owns it. Collective.

    Args:
        rows: (n, ...) of any dtype without Python objects; dtype and shape[1:] are the same on all ranks.
        owners: (n,) ranks.

    Returns:
        (m, ...) the rows that this rank owns, ordered by sending rank, then by their order on that rank.
    """
    order = np.argsort(owners, kind="stable")
    bounds = np.searchsorted(owners[order], np.arange(1, comm.size))
    outgoing = np.split(rows[order], bounds)
    step = _rows_per_round(rows, comm.size)
    rounds = max(comm.allgather(max(-(-len(part) // step) for part in outgoing)))
    incoming: list[list[np.ndarray]] = [[rows[:0]] for _ in range(comm.size)]
    for start in range(0, rounds * step, step):
        for sender, part in enumerate(comm.alltoall([part[start : start + step] for part in outgoing])):
            incoming[sender].append(part)
    return np.concatenate([part for parts in incoming for part in parts])


def _rows_per_round(rows: np.ndarray, parts: int) -> int:
    """The number of rows in one message when `parts` messages are sent at once."""
    row_bytes = rows.itemsize * int(np.prod(rows.shape[1:]))
    return max(1, MESSAGE_BYTES // (parts * max(1, row_bytes)))
