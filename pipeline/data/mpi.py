"""The few MPI operations that the data stages need. A lone process needs no MPI at all."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import UserError
from pipeline.files import disk_full_named
from pipeline.launch.ranks import Ranks


class Comm(Protocol):
    """The part of mpi4py's communicator that is used here."""

    rank: int
    size: int

    def bcast(self, value: Any, root: int = 0) -> Any:
        """The root's value, on every rank."""

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        """Every rank's value on the root, None elsewhere."""

    def barrier(self) -> None:
        """Wait for all ranks."""


class Alone:
    """The communicator of a process without peers."""

    rank, size = 0, 1

    def bcast(self, value: Any, root: int = 0) -> Any:  # noqa: ARG002
        """The value itself."""
        return value

    def gather(self, value: Any, root: int = 0) -> list[Any]:  # noqa: ARG002
        """The value itself, in a list."""
        return [value]

    def barrier(self) -> None:
        """Nobody to wait for."""


@contextmanager
def world(ranks: Ranks, output: Path) -> Iterator[Comm]:
    """The communicator of all ranks. An error on one rank inside the block ends the whole job instead of leaving the others waiting.

    Args:
        output: the folder that is being written, named when its disk is full.

    Raises:
        UserError: MPI and the launcher disagree about the number of ranks.
    """
    if ranks.world_size == 1:
        with disk_full_named(output):
            yield Alone()
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
        with disk_full_named(output):
            yield comm
    except BaseException as error:
        print(error if isinstance(error, UserError) else traceback.format_exc(), file=sys.stderr, flush=True)
        code = 2 if isinstance(error, UserError) else 1
        comm.Abort(code)
        os._exit(code)  # MPICH's Abort comes back; leaving the ordinary way would report the error again and wait in MPI's finalisation
