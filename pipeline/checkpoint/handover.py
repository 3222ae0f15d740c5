"""What the ranks of a node and its writer process tell each other: messages over a Unix socket. Imports no torch."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.checkpoint.native import Index
from pipeline.checkpoint.parts import Part
from pipeline.common.errors import UserError, Violation
from pipeline.config.optimizer import OptimizerConfig


@dataclass(frozen=True)
class SharedPlace:
    """Where the bytes of a part and kind lie in a rank's shared memory: number of the segment, offset, and bytes."""

    segment: int
    offset: int
    bytes: int


@dataclass(frozen=True)
class Member:
    """A rank introduces itself; its segments follow as file descriptors, and then the lock of the run directory, if it has it.

    Attributes:
        ranks: all ranks of the node.
        nodes: number of nodes; each writes one record.
        run_dir: the run directory, in which checkpoints/ exists.
        identity: of checkpoints/ (identity_of): another folder in its place is not written to.
        sharing: the ranks of the node whose data is in the same file, in order.
        file: name of this file.
        places: kind -> place, for each of the parts.
        segments: bytes of each segment.
        has_lock: whether the lock of the run directory is among the file descriptors.
        patience: seconds after which the other nodes are not waited for any longer, if none of their records has appeared.
    """

    rank: int
    ranks: tuple[int, ...]
    node: int
    nodes: int
    run_dir: Path
    identity: tuple[int, int] | None
    sharing: tuple[int, ...]
    file: str
    parts: list[Part]
    places: list[dict[str, SharedPlace]]
    segments: list[int]
    has_lock: bool
    patience: float


@dataclass(frozen=True)
class LastUpdate:
    """The last update before a save, by which a weight that should have changed is recognized.

    Attributes:
        updates: number of updates so far.
        steps: of the run.
    """

    lr: float
    updates: int
    optimizer: OptimizerConfig
    steps: int


@dataclass(frozen=True)
class Commit:
    """What the rank that commits adds to its save.

    Attributes:
        index: the index without its parts.
        keep: number of newest checkpoints that are kept.
        keep_every: steps; a checkpoint whose step is a multiple is kept for ever, 0 for none.
        needed: names of folders that are kept besides.
    """

    index: Index
    keep: int
    keep_every: int
    needed: frozenset[str]


@dataclass(frozen=True)
class Save:
    """The segments of a rank hold a checkpoint, and do not change until the answer.

    Attributes:
        attempt: token that is part of the name of its partial folder; another one for every attempt.
        number: of the save: the same on all ranks, and larger for every later one.
        sums: word_sum of the live tensors, kind -> sum, for each part.
        previous: checksum of the weight of each part in the previous save, 0 if there was none.
        update: the last update, if there was one since the previous save.
        commit: set by the rank that commits.
    """

    step: int
    attempt: str
    number: int
    sums: list[dict[str, int]]
    previous: npt.NDArray[np.uint64] | None = None
    update: LastUpdate | None = None
    commit: Commit | None = None


@dataclass(frozen=True)
class Abandon:
    """An attempt cannot be completed, since a rank has not handed over its part. Attributes as of Save."""

    step: int
    attempt: str
    number: int
    reason: str


@dataclass(frozen=True)
class Written:
    """The answer when the data of a rank is on the disk: checksum of the weight of each part, 0 without one."""

    attempt: str
    digests: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, np.uint64))


@dataclass(frozen=True)
class Failed:
    """The answer when the data of a rank, or the checkpoint (`commit`), could not be written.

    Attributes:
        commit: whether the checkpoint failed, and not only the data of this rank.
        not_finite: the weight that is not finite, empty if that is not the reason.
        told: whether the process that commits knows of it, or finds it in the partial folder.
    """

    attempt: str
    reason: str
    commit: bool = False
    not_finite: str = ""
    told: bool = True


@dataclass(frozen=True)
class Committed:
    """The answer to the rank that commits: the checkpoint is complete."""

    attempt: str
    step: int
    folder: Path


def identity_of(folder: Path) -> tuple[int, int] | None:
    """Device and inode of a folder; None if it does not exist."""
    try:
        status = folder.stat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


def listen(name: str) -> socket.socket:
    """Listen at an abstract Unix address: it belongs to no file system, and vanishes with the process.

    Raises:
        OSError: another process listens there.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0{name}")
    listener.listen(128)
    return listener


def connect(name: str) -> Connection:
    """Connect to a writer process of this user.

    Raises:
        OSError: there is none, or it belongs to another user.
    """
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.connect(f"\0{name}")
        check_peer(peer)
        return Connection(peer.detach())
    finally:
        peer.close()


def check_peer(peer: socket.socket) -> None:
    """Refuse a process of another user: messages are pickled.

    Raises:
        PermissionError: the process at the other end belongs to another user.
    """
    _, user, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user != os.getuid():
        raise PermissionError(f"the process at the other end of the socket belongs to user {user}")


def send_files(connection: Connection, files: list[int]) -> None:
    """Send file descriptors; the other end calls receive_files before it receives the next message."""
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        socket.send_fds(peer, [b"F"], files)


def receive_files(connection: Connection, count: int) -> list[int]:
    """Receive as many file descriptors as were sent.

    Raises:
        EOFError: the other end was closed.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        data, files, _, _ = socket.recv_fds(peer, 1, count)
    if not data or len(files) != count:
        raise EOFError
    return files


class NotFiniteWeightsError(UserError):
    """A run must end, since its weights are not finite."""


def not_finite(step: int, name: str) -> NotFiniteWeightsError:
    """The error of a run that has made so many steps, and in which a weight, such as that of this name, is not finite."""
    rule = f"{name} contains values that are not finite; no checkpoint was written"
    fix = "reduce optimizer.lr and run again, which continues from the newest checkpoint; metrics.jsonl shows where the loss diverges"
    return NotFiniteWeightsError([Violation("weights after step", step, rule, fix)])
