"""The few MPI operations that the data stages need. A lone process needs no MPI at all."""

from __future__ import annotations

import fcntl
import os
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

from pipeline.errors import UserError
from pipeline.files import report_disk_full
from pipeline.launch.ranks import Ranks

MESSAGE_BYTES = 64 << 20
"""What a rank sends in one round of an exchange: MPI before version 4 counts in 31 bits, and not all should be in memory twice."""


class Comm(Protocol):
    """The part of mpi4py's communicator that is used here."""

    rank: int
    size: int

    @property
    def isend(self) -> Any:
        """Sends a value without waiting; returns a request, which has to be kept."""

    @property
    def recv(self) -> Any:
        """Waits for a value of any rank."""

    @property
    def iprobe(self) -> Any:
        """Tells whether a value is there to be received."""

    def bcast(self, value: Any, root: int = 0) -> Any:
        """The root's value, on every rank."""

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Every rank's value on the root, None elsewhere."""

    def allgather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""

    def alltoall(self, values: Sequence[Any]) -> list[Any]:
        """One value to every rank, one from every rank."""

    def barrier(self) -> None:
        """Wait for all ranks."""


class SingleProcessComm:
    """The communicator of a process without peers."""

    rank, size = 0, 1
    isend = recv = iprobe = None  # nobody to send to, nobody to hear from

    def bcast(self, value: Any, root: int = 0) -> Any:  # noqa: ARG002
        """The value itself."""
        return value

    def gather(self, value: Any, root: int = 0) -> list[Any]:  # noqa: ARG002
        """The value itself, in a list."""
        return [value]

    def allgather(self, value: Any) -> list[Any]:
        """The value itself, in a list."""
        return [value]

    def alltoall(self, values: Sequence[Any]) -> list[Any]:
        """The only value, to and from itself."""
        return list(values)

    def barrier(self) -> None:
        """Nobody to wait for."""


def share_cores(ranks: Ranks) -> None:
    """Let the threads of libraries (tokenizers, rensa) use this rank's part of the machine. They read it when they first work."""
    cores = min(len(os.sched_getaffinity(0)), max(1, (os.cpu_count() or 1) // ranks.local_size))
    os.environ.setdefault("RAYON_NUM_THREADS", str(cores))


@contextmanager
def world(ranks: Ranks, output: Path) -> Iterator[Comm]:
    """The communicator of all ranks. An error on one rank inside the block ends the whole job instead of leaving the others waiting.

    Args:
        output: the folder that is being written, named when its disk is full.

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
        # With a PMI that does not fit, every process believes that it is alone, and all would write the same files.
        raise UserError.of(
            "world size",
            ranks.world_size,
            f"{ranks.launcher} started {ranks.world_size} ranks, MPI sees {comm.size}",
            "start data stages with the mpirun of the MPI that mpi4py was built with, or with srun --mpi=pmi2",
        )
    try:
        with report_disk_full(output):
            yield comm
    except BaseException as error:
        print(error if isinstance(error, UserError) else traceback.format_exc(), file=sys.stderr, flush=True)
        _wait_for_reader(sys.stderr)
        code = 2 if isinstance(error, UserError) else 1
        comm.Abort(code)
        os._exit(code)  # MPICH's Abort comes back; leaving the ordinary way would report the error again and wait in MPI's finalisation


def _wait_for_reader(stream: TextIO, seconds: float = 5.0) -> None:
    """Until the launcher has taken what went into its pipe: after Abort, mpirun ends at once and drops what it has not read."""
    if not stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
        return
    unread, deadline = array("i", [0]), time.monotonic() + seconds
    while time.monotonic() < deadline:
        fcntl.ioctl(stream.fileno(), termios.FIONREAD, unread)
        if not unread[0]:
            return
        time.sleep(0.01)


def exchange(comm: Comm, rows: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Send every row to the rank that owns it. All ranks call this.

    Args:
        rows: (n, ...) of any type without Python objects, the same on all ranks but for n.
        owners: (n,) ranks.

    Returns:
        (m, ...) the rows that this rank owns: in the order of their senders, from each in the order in which it held them.
    """
    order = np.argsort(owners, kind="stable")
    bounds = np.searchsorted(owners[order], np.arange(1, comm.size))
    outgoing = np.split(rows[order], bounds)
    step = _rows_a_round(rows, comm.size)
    rounds = max(comm.allgather(max(-(-len(part) // step) for part in outgoing)))
    incoming: list[list[np.ndarray]] = [[rows[:0]] for _ in range(comm.size)]
    for start in range(0, rounds * step, step):
        for sender, part in enumerate(comm.alltoall([part[start : start + step] for part in outgoing])):
            incoming[sender].append(part)
    return np.concatenate([part for parts in incoming for part in parts])


def share(comm: Comm, rows: np.ndarray) -> np.ndarray:
    """The root's rows, on every rank. The other ranks give rows of the same type, of any length."""
    step = _rows_a_round(rows, 1)
    starts = range(0, comm.bcast(len(rows)), step)
    return np.concatenate([rows[:0], *(comm.bcast(rows[start : start + step]) for start in starts)])


def _rows_a_round(rows: np.ndarray, parts: int) -> int:
    """How many rows go into one message, when as many messages as parts leave at once."""
    row_bytes = rows.itemsize * int(np.prod(rows.shape[1:]))
    return max(1, MESSAGE_BYTES // (parts * max(1, row_bytes)))
