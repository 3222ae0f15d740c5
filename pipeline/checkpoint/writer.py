"""The writer process of a node: hashes and writes what the ranks of the node hand over, and commits checkpoints. Imports no torch.

`python -m pipeline.checkpoint.writer LISTENER CONNECTION` is started by the first rank of each node (writer_process.py), before that has
process groups and a GPU. The process is in a session of its own and ignores the signals that announce the end of a job: what was handed
over is written, also if the ranks die in the meantime, and then it ends. It maps the memory of the ranks to read only.

A thread serves each rank. When all ranks of the node have written, one record names their files; the writer of node 0 waits for the records
of all nodes in a thread of its own, and commits. A save whose part a rank cannot hand over any more is given up at once: the rank has ended
or has gone on to a later save, perhaps since it had handed over to a writer process before this one, which has died.
"""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from pipeline.checkpoint import catalog, commit, handover, records
from pipeline.checkpoint.attempt import Attempt, check_folder, discard, finish, reason_of, tell, tell_later
from pipeline.checkpoint.handover import Abandon, Commit, Committed, Failed, Member, Save, Written
from pipeline.checkpoint.staged_file import Handed, NotFiniteError, Segments, weight_digests, write_file
from pipeline.common import locks

#: Seconds that the records of other nodes are waited for after the ranks of this node have ended.
_LINGER = 60.0


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


class WriterState:
    """What the threads of the process share."""

    def __init__(self) -> None:
        self._ranks: dict[int, Rank] = {}
        self._gone: set[int] = set()
        self._latest: dict[int, int] = {}  # rank -> number of the last save that it has handed over
        self._attempts: dict[str, Attempt] = {}
        self._lock = threading.Lock()
        self._commits: list[threading.Thread] = []
        self._ended: float | None = None
        self._lock_file: int | None = None

    def join(self, rank: Rank, lock_file: int | None) -> None:
        """A rank has connected."""
        with self._lock:
            self._ranks[rank.member.rank] = rank
            self._gone.discard(rank.member.rank)
            self._lock_file = self._lock_file if lock_file is None else lock_file

    def leave(self, rank: Rank) -> None:
        """A rank has ended, or closed its connection."""
        with self._lock:
            if self._ranks.get(rank.member.rank) is rank:  # it has not connected again
                del self._ranks[rank.member.rank]
                self._gone.add(rank.member.rank)
            if not self._ranks:
                self._gone.update(rank.member.ranks)
                self._ended = time.monotonic()
                if self._lock_file is not None and any(thread.is_alive() for thread in self._commits):
                    locks.note_last_write(self._lock_file)
        self._give_up_impossible(rank.member)

    def finish(self) -> None:
        """Wait for the commits."""
        for thread in self._commits:
            thread.join()

    def hand_over(self, rank: Rank, save: Save) -> None:
        """Write what a rank has handed over, and the record of the node when all its ranks have written."""
        member = rank.member
        with self._lock:
            attempt = self._attempt(save)
            attempt.handed[member.rank] = Handed(member, rank.segments, save)
            self._latest[member.rank] = save.number
            sharing = [attempt.handed[other] for other in member.sharing if other in attempt.handed]
        if save.commit is not None:
            before = [thread for thread in self._commits if thread.is_alive()]
            thread = threading.Thread(target=self._commit, args=(rank, save, save.commit, attempt, before), name=save.attempt)
            self._commits = [*before, thread]
            thread.start()
        self._give_up_impossible(member)
        if len(sharing) == len(member.sharing):  # otherwise the last of them writes the file
            self._write(sharing, attempt)
        elif attempt.abandoned:
            rank.answer(Failed(save.attempt, attempt.abandoned))

    def _attempt(self, message: Save | Abandon) -> Attempt:
        """The attempt of a message; those are forgotten that no rank hands over to any more. Under the lock."""
        for old in [attempt.name for attempt in self._attempts.values() if attempt.number < message.number - 1]:
            del self._attempts[old]  # ranks may be one save apart
        return self._attempts.setdefault(message.attempt, Attempt(message.attempt, message.number, message.step))

    def _give_up_impossible(self, member: Member) -> None:
        """Give up the attempts of which a part will not come: its rank has ended, or gone on."""
        impossible = []
        with self._lock:
            for attempt in self._attempts.values():
                for other in [] if attempt.abandoned else [rank for rank in member.ranks if rank not in attempt.handed]:
                    if other in self._gone:
                        impossible.append((attempt, f"rank {other} ended before it had handed over its part"))
                    elif self._latest.get(other, 0) > attempt.number:
                        impossible.append((attempt, f"rank {other} has not handed over its part, as the writer process had ended"))
        for attempt, reason in impossible:
            self._give_up(member, attempt, reason)

    def _give_up(self, member: Member, attempt: Attempt, reason: str) -> None:
        """Give up an attempt, tell those who wait for it, and remove what nobody else removes."""
        with self._lock:
            if not attempt.abandoned:
                attempt.abandoned = reason
            committing = any(thread.name == attempt.name and thread.is_alive() for thread in self._commits)
            waiting = [handed for handed in attempt.handed.values() if not attempt.handed.keys() >= set(handed.member.sharing)]
        self._answer(waiting, [Failed(attempt.name, reason)] * len(waiting))  # the file that they share is not written
        if member.node > 0:
            tell(member, attempt, reason)
        elif member.nodes == 1 and not committing:
            discard(member, attempt.step, attempt.name)

    def _write(self, sharing: list[Handed], attempt: Attempt) -> None:
        """Write the file of the ranks that share it, and the record of the node after its last file."""
        member, save = sharing[0].member, sharing[0].save
        folder = commit.partial_folder(member.run_dir, save.step, save.attempt)
        try:
            if attempt.abandoned:
                raise ValueError(attempt.abandoned)
            check_folder(member)
            folder.mkdir(exist_ok=True)
            written = write_file(folder / member.file, sharing) if any(handed.member.parts for handed in sharing) else None
            with self._lock:
                if written is not None:
                    attempt.files[member.file] = written
                attempt.done |= set(member.sharing)
                last = attempt.done == set(member.ranks)
            if last:
                records.write_record(folder, member.node, [attempt.files[name] for name in sorted(attempt.files)])
        except Exception as error:
            reason, told = attempt.abandoned or reason_of(error), member.node == 0
            with suppress(OSError):
                check_folder(member)
                if folder.is_dir():
                    (folder / member.file).unlink(missing_ok=True)  # a full disk then has space for the failure, which other nodes read
                    told = commit.write_failure(folder, member.node, reason) or told
                    if not told:
                        tell_later(folder, member.node, reason, member.patience)
                elif not attempt.abandoned:
                    reason = f"the checkpoint was given up in the meantime ({reason})"
            failed = Failed(save.attempt, reason, not_finite=str(error) if isinstance(error, NotFiniteError) else "", told=told)
            if attempt.abandoned and member.node == 0:
                discard(member, save.step, save.attempt)
            with self._lock:  # whoever waits for the record does not need the file of the failure, which a full disk has no space for
                attempt.abandoned = attempt.abandoned or reason
            self._answer(sharing, [failed] * len(sharing))
            return
        answers: list[Written | Failed] = []
        end = 0
        for handed in sharing:
            start, end = end, end + len(handed.member.parts)
            answers.append(Written(save.attempt, weight_digests(written, start, end)))
        self._answer(sharing, answers)

    def _answer(self, ranks: list[Handed], answers: Sequence[Written | Failed]) -> None:
        """Answer the ranks that are still there."""
        for handed, answer in zip(ranks, answers, strict=True):
            with self._lock:
                rank = self._ranks.get(handed.member.rank)
            if rank is not None:
                rank.answer(answer)

    def abandon(self, rank: Rank, message: Abandon) -> None:
        """A rank of this node has not handed over its part, or rank 0 knows that one of another node has not."""
        with self._lock:
            attempt = self._attempt(message)
        self._give_up(rank.member, attempt, message.reason)

    def _commit(self, rank: Rank, save: Save, settings: Commit, attempt: Attempt, before: list[threading.Thread]) -> None:
        """Wait for the records of all nodes, commit, and remove what is not kept. A thread, after those of earlier saves."""
        member = rank.member
        for thread in before:
            thread.join()
        try:
            check_folder(member)
            commit.finish_interrupted(member.run_dir)
            partial = commit.begin(member.run_dir, settings.index, save.attempt, member.nodes)
            folder = finish(member.run_dir, partial, member.nodes, lambda: attempt.abandoned, lambda: self._patience(member))
        except Exception as error:
            reason = reason_of(error)
            self._give_up(member, attempt, reason)
            if discard(member, save.step, save.attempt):
                with suppress(OSError):
                    commit.abandon(member.run_dir)
            rank.answer(Failed(save.attempt, reason, commit=True))
            return
        rank.answer(Committed(save.attempt, save.step, folder))
        try:
            catalog.prune(member.run_dir, settings.keep, settings.keep_every, lambda old: old.name in settings.needed)
        except OSError:
            traceback.print_exc()  # the next save removes them

    def _patience(self, member: Member) -> float:
        """Seconds that the records of other nodes are waited for."""
        return member.patience if self._ended is None else min(member.patience, _LINGER)


def serve(node: WriterState, connection: Connection) -> None:
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
    node, threads = WriterState(), []

    def start(connection: Connection) -> None:
        threads.append(threading.Thread(target=serve, args=(node, connection)))
        threads[-1].start()

    start(Connection(connection_file))
    with socket.socket(fileno=listener_file) as listener:
        listener.settimeout(0.2)
        while any(thread.is_alive() for thread in threads):  # a rank may connect again
            with suppress(TimeoutError):
                peer, _ = listener.accept()
                peer.setblocking(True)
                with suppress(PermissionError):
                    handover.check_peer(peer)
                    start(Connection(peer.detach()))
    node.finish()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
