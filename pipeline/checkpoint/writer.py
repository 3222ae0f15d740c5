"""The writer process of a node: hashes and writes what the ranks of the node hand over, and commits checkpoints. Imports no torch.

`python -m pipeline.checkpoint.writer LISTENER CONNECTION` is started by the first rank of each node (async_save.py), before that has process
groups and a GPU. The process is in a session of its own and ignores the signals that announce the end of a job: what was handed over is
written, also if the ranks die in the meantime, and then it ends. It reads the shared memory of the ranks and can change none of their state.

A thread serves each rank. When all ranks of the node have written, one record names their files; the writer of node 0 waits for the records
of all nodes in a thread of its own, and commits.
"""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from pipeline.checkpoint import commit, committing, data_file, handover, records
from pipeline.checkpoint.data_file import WrittenFile
from pipeline.checkpoint.handover import Abandon, Commit, Committed, Failed, Member, Place, Save, Written, identity_of
from pipeline.checkpoint.parts import ITEM_SIZE, NOT_STORED
from pipeline.checkpoint.staged_checks import chunks, finite_bits, should_have_changed, word_sum
from pipeline.common import locks

#: Bytes that are verified, hashed and written at a time.
_CHUNK = 4 << 20
#: Seconds that the records of other nodes are waited for after the ranks of this node have ended.
_LINGER = 60.0


class NotFiniteError(ValueError):
    """A weight is not finite."""


class Segments:
    """The shared memory of a rank."""

    def __init__(self, files: list[int], sizes: list[int]) -> None:
        self._maps = [mmap.mmap(file, size, prot=mmap.PROT_READ) for file, size in zip(files, sizes, strict=True)]
        for file in files:
            os.close(file)

    def read(self, place: Place) -> Iterator[memoryview]:
        """Yield the bytes of a place; pages that were read do not count as memory of this process any more."""
        with memoryview(self._maps[place.segment]) as view:
            for first, last in chunks(place.bytes, _CHUNK):
                yield view[place.offset + first : place.offset + last]
                page = (place.offset + first) // mmap.PAGESIZE * mmap.PAGESIZE
                self._maps[place.segment].madvise(mmap.MADV_DONTNEED, page, place.offset + last - page)

    def array(self, place: Place) -> np.ndarray:
        """The fp32 numbers of a place."""
        return np.frombuffer(self._maps[place.segment], np.float32, place.bytes // 4, place.offset)


@dataclass
class Rank:
    """A rank that this process serves."""

    member: Member
    segments: Segments
    connection: Connection
    sending: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, message: Written | Failed | Committed) -> None:
        """Send an answer, unless the rank has ended."""
        with self.sending, suppress(OSError):
            self.connection.send(message)


@dataclass
class Attempt:
    """A save in progress: what the ranks of this node have handed over and written, by rank."""

    saves: dict[int, Save] = field(default_factory=dict)
    files: dict[str, WrittenFile] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    abandoned: str = ""


class Node:
    """What the threads of the process share."""

    def __init__(self) -> None:
        self.ranks: dict[int, Rank] = {}
        self.expected: tuple[int, ...] = ()
        self._attempts: dict[str, Attempt] = {}
        self._lock = threading.Lock()
        self._commits: list[threading.Thread] = []
        self._ended: float | None = None
        self._lock_file: int | None = None

    def join(self, rank: Rank, lock_file: int | None) -> None:
        """A rank has connected."""
        with self._lock:
            self.ranks[rank.member.rank], self.expected = rank, rank.member.ranks
            self._lock_file = self._lock_file if lock_file is None else lock_file

    def leave(self, rank: Rank) -> None:
        """A rank has ended, or closed its connection."""
        with self._lock:
            del self.ranks[rank.member.rank]
            if not self.ranks:
                self._ended = time.monotonic()
                if self._lock_file is not None and any(thread.is_alive() for thread in self._commits):
                    locks.note_last_write(self._lock_file)

    def finish(self) -> None:
        """Wait for the commits."""
        for thread in self._commits:
            thread.join()

    def hand_over(self, rank: Rank, save: Save) -> None:
        """Write what a rank has handed over, and the record of the node when all its ranks have written."""
        member = rank.member
        with self._lock:
            attempt = self._attempts.setdefault(save.attempt, Attempt())
            attempt.saves[member.rank] = save
            for old in list(self._attempts)[:-2]:
                del self._attempts[old]
            sharing = [self.ranks[other] for other in member.ranks if other in self.ranks and self.ranks[other].member.file == member.file]
            complete = all(other.member.rank in attempt.saves for other in sharing)
        if save.commit is not None:
            before = [thread for thread in self._commits if thread.is_alive()]
            thread = threading.Thread(target=self._commit, args=(rank, save, save.commit, attempt, before), name=save.attempt)
            self._commits = [*before, thread]
            thread.start()
        if not complete:
            return  # the last rank that shares the file writes it
        folder = commit.partial_folder(member.run_dir, save.step, save.attempt)
        try:
            check_folder(member)
            folder.mkdir(exist_ok=True)
            written = write_file(folder / member.file, sharing, attempt)
            with self._lock:
                attempt.files[member.file] = written
                attempt.done |= {other.member.rank for other in sharing}
                last = attempt.done == set(member.ranks)
            if last:
                records.write_record(folder, member.node, [attempt.files[name] for name in sorted(attempt.files)])
        except Exception as error:
            reason = reason_of(error)
            with suppress(Exception):
                check_folder(member)
                commit.write_failure(folder, member.node, reason)
            name = str(error) if isinstance(error, NotFiniteError) else ""
            for other in sharing:
                other.answer(Failed(save.attempt, reason, not_finite=name))
            return
        end = 0
        for other in sharing:
            start, end = end, end + len(other.member.parts)
            other.answer(Written(save.attempt, weight_digests(written, start, end)))

    def abandon(self, rank: Rank, message: Abandon) -> None:
        """A rank of this node has not handed over its part, or rank 0 knows that one of another node has not."""
        with self._lock:
            self._attempts.setdefault(message.attempt, Attempt()).abandoned = message.reason
            committing = any(thread.name == message.attempt and thread.is_alive() for thread in self._commits)
        with suppress(OSError):
            check_folder(rank.member)
            folder = commit.partial_folder(rank.member.run_dir, message.step, message.attempt)
            if rank.member.nodes == 1 and not committing:
                shutil.rmtree(folder, ignore_errors=True)  # without a commit that would do it

    def _commit(self, rank: Rank, save: Save, settings: Commit, attempt: Attempt, before: list[threading.Thread]) -> None:
        """Wait for the records of all nodes, commit, and remove what is not kept. A thread, after those of earlier saves."""
        member = rank.member
        for thread in before:
            thread.join()
        try:
            check_folder(member)
            commit.abandon(member.run_dir)  # a failed attempt, whose bytes this one may need
            partial = commit.begin(member.run_dir, settings.index, save.attempt, member.nodes)
            folder = committing.finish(
                member.run_dir, partial, member.nodes, lambda: attempt.abandoned, lambda: self._patience(member)
            )
        except Exception as error:
            with suppress(Exception):
                check_folder(member)
                commit.abandon(member.run_dir)
            rank.answer(Failed(save.attempt, reason_of(error), commit=True))
            return
        rank.answer(Committed(save.attempt, save.step, folder))
        try:
            committing.prune(member.run_dir, settings)
        except OSError:
            traceback.print_exc()  # the next save removes them

    def _patience(self, member: Member) -> float:
        """Seconds that the records of other nodes are waited for."""
        return member.patience if self._ended is None else min(member.patience, _LINGER)


def check_folder(member: Member) -> None:
    """Refuse to write into the folder of another run.

    Raises:
        FileNotFoundError: the folder of the checkpoints was removed, renamed or replaced.
    """
    folder = member.run_dir / "checkpoints"
    if identity_of(folder) != member.identity:
        raise FileNotFoundError(f"{folder} was removed or renamed while the run was writing to it")


def write_file(path: Path, ranks: list[Rank], attempt: Attempt) -> WrittenFile:
    """Write the data file of a rank, or of the ranks that share it, and verify what is written.

    Raises:
        OSError: it cannot be written.
        ValueError: the bytes are not those of the snapshot, not finite, or those of the previous save.
    """
    owned = [(rank, number) for rank in ranks for number in range(len(rank.member.parts))]

    def read(position: int, kind: str) -> Iterator[memoryview]:
        rank, number = owned[position]
        part, place = rank.member.parts[number], rank.member.places[number][kind]
        dtype, total = part.dtypes[kind], 0
        for data in rank.segments.read(place):
            total += word_sum(data, ITEM_SIZE[dtype])
            if kind == "weight" and not finite_bits(data, dtype):
                raise NotFiniteError(part.name)
            yield data
        if total & 0xFFFFFFFF != attempt.saves[rank.member.rank].sums[number][kind]:
            raise ValueError(f"{kind} of {part.name} was not copied as it was when the save began: {part.key(kind)} has another sum")

    written = data_file.write(path, [rank.member.parts[number] for rank, number in owned], read)
    digests = weight_digests(written, 0, len(owned))
    start = 0
    for rank in ranks:
        check_stale(rank, attempt.saves[rank.member.rank], digests[start : start + len(rank.member.parts)])
        start += len(rank.member.parts)
    return written


def weight_digests(written: WrittenFile, start: int, end: int) -> np.ndarray:
    """The checksum of the weight of parts `start : end` of a file; 0 for a part without one."""
    if "weight" not in written.kinds:
        return np.zeros(end - start, np.uint64)
    places = written.places[start:end, written.kinds.index("weight")]
    return np.where(places[:, 0] == np.uint64(NOT_STORED), np.uint64(0), places[:, 2])


def check_stale(rank: Rank, save: Save, digests: np.ndarray) -> None:
    """Refuse a weight that equals the previous save although its last update changed it.

    Raises:
        ValueError: with the name of the weight.
    """
    if save.update is None or save.previous is None:
        return
    for number in np.flatnonzero((digests == save.previous) & (digests != 0)):
        part, places = rank.member.parts[number], rank.member.places[number]
        if not {"weight", "exp_avg", "exp_avg_sq"} <= part.dtypes.keys() or part.dtypes["weight"] != "F32":
            continue
        values = [rank.segments.array(places[kind]) for kind in ("weight", "exp_avg", "exp_avg_sq")]
        if should_have_changed(*values, save.update):
            raise ValueError(f"{part.name} equals the previous save, although its last update changed it: the copy is stale")


def reason_of(error: Exception) -> str:
    """The reason of a failed save, for the log."""
    if isinstance(error, NotFiniteError):
        return f"{error} contains values that are not finite"
    if not isinstance(error, (OSError, ValueError)):
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return str(error)


def serve(node: Node, connection: Connection) -> None:
    """Serve a rank until it ends. A thread."""
    rank = None
    try:
        member = connection.recv()
        files = handover.receive_files(connection, len(member.segments) + member.has_lock) if member.segments or member.has_lock else []
        rank = Rank(member, Segments(files[: len(member.segments)], member.segments), connection)
        node.join(rank, files[-1] if member.has_lock else None)
        while True:
            message = connection.recv()
            if isinstance(message, Abandon):
                node.abandon(rank, message)
            else:
                node.hand_over(rank, message)
    except (EOFError, OSError):
        pass  # the rank has ended
    finally:
        if rank is not None:
            node.leave(rank)


def main(listener_file: int, connection_file: int) -> None:
    """Serve the ranks of a node until all of them have ended, and what they handed over is written."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    node, threads = Node(), []

    def start(connection: Connection) -> None:
        threads.append(threading.Thread(target=serve, args=(node, connection)))
        threads[-1].start()

    start(Connection(connection_file))
    with socket.socket(fileno=listener_file) as listener:
        listener.settimeout(0.2)
        while threads[0].is_alive() and not (node.expected and len(threads) >= len(node.expected)):
            with suppress(TimeoutError):
                peer, _ = listener.accept()
                peer.setblocking(True)
                with suppress(PermissionError):
                    handover.check_peer(peer)
                    start(Connection(peer.detach()))
    for thread in threads:
        thread.join()
    node.finish()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
