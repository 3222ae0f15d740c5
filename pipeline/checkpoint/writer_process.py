"""Starts the writer process of a node, tells why it ended, and connects a rank to it, or to the one that follows. Imports no torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from pipeline.checkpoint import handover
from pipeline.checkpoint.handover import Abandon, Committed, Failed, Member, Save, Written

#: Signals that launchers send to announce the end of a job, or to end it; the writer ignores them.
IGNORED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
#: Seconds that the end of the process is waited for.
_END = 10.0
#: Seconds within which a rank connects to the writer that the first rank of its node has started.
_CONNECT = 20.0


class WriterProcess:
    """The writer process of a node, whose parent is the first rank of the node.

    The process keeps no stream of its parent, for whose end launchers wait: its errors go to a file, which is removed with both processes.

    Args:
        name: the address at which the other ranks of the node connect.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._connection: Connection | None = None

    def connect(self) -> Connection:
        """Return the connection of the parent to the process, which is started again after the first call.

        Raises:
            OSError: it cannot be started.
        """
        if self._connection is None:
            self.start()
        connection, self._connection = self._connection, None
        assert connection is not None
        return connection

    def start(self) -> None:
        """Start the process; an earlier one, which has ended or cannot be reached any more, is killed.

        Raises:
            OSError: it cannot be started.
        """
        self.kill()
        self._wait()
        if self._errors is not None:
            self._errors.close()
        ours, theirs = socket.socketpair()
        listener = handover.listen(self.name)
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        root = str(Path(__file__).resolve().parents[2])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)  # the process inherits the mask until it ignores them
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.checkpoint.writer", str(listener.fileno()), str(theirs.fileno())],
                pass_fds=(listener.fileno(), theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            )
        except OSError:
            ours.close()
            errors.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            listener.close()
            theirs.close()
        self._errors, self._connection = errors, Connection(ours.detach())

    @property
    def pid(self) -> int | None:
        """Its process id."""
        return None if self._process is None else self._process.pid

    def reason(self) -> str:
        """Why it ended: exit code or signal, and the last line that it printed. Waits for its end."""
        if self._process is None or self._errors is None:
            return "it was not started"
        code = self._wait()
        with suppress(OSError, ValueError):
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
            if lines:
                return f"exit code {code}, {lines[-1]}"
        return f"exit code {code}"

    def kill(self) -> None:
        """End a process that does not answer."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> int | None:
        """Wait for the end of the process, whose connections are closed; it may go on for a while if other ranks still use it.

        Returns:
            Its exit code, negative for a signal; None if it goes on.
        """
        if self._connection is not None:  # nobody has used it
            self._connection.close()
            self.kill()
        code = self._wait()
        if self._errors is not None:
            self._errors.close()
        return code

    def _wait(self) -> int | None:
        """Its exit code, None if it goes on."""
        if self._process is None:
            return None
        try:
            return self._process.wait(_END)
        except subprocess.TimeoutExpired:
            return None


class WriterEndedError(OSError):
    """The writer process has ended, or does not answer; what it had is lost."""


class WriterConnection:
    """The connection of a rank. One thread receives; the thread of a snapshot delivers saves.

    Args:
        files: the file descriptors that follow.
        process: the writer process, on the rank that has started it and starts it again.

    Raises:
        OSError: the writer process cannot be started, or does not answer.
    """

    def __init__(self, member: Member, files: Sequence[int], address: str, process: WriterProcess | None) -> None:
        self._member, self._files, self._address, self._process = member, list(files), address, process
        self._lock = threading.Lock()
        self._connection: Connection | None = self._connect()

    def deliver(self, save: Save, wanted: Callable[[], bool], patient: Callable[[], bool]) -> None:
        """Send a save. If the writer has ended, its first rank starts it again; a rank that learns of the end here may be the only one.

        Args:
            save: a copy that is ready.
            wanted: whether the save was not given up; otherwise nothing is sent.
            patient: whether a writer that is not there yet is waited for.

        Raises:
            WriterEndedError: the writer has ended, and other ranks may have handed over to it.
            OSError: it cannot be started again, or does not answer.
        """
        with self._lock:
            for last in (self._process is None, True):
                if not wanted():
                    return
                if self._connection is None:
                    self._connection = self._connect(lambda: wanted() and patient())
                try:
                    self._connection.send(save)
                    return
                except OSError:
                    self._connection = None  # not closed: the other thread may wait for it
                    if last:
                        raise WriterEndedError(self._why("the writer process ended")) from None

    def send(self, message: Abandon) -> bool:
        """Send a message; returns whether there is a writer that has got it."""
        with self._lock, suppress(OSError):
            if self._connection is not None:
                self._connection.send(message)
                return True
        return False

    def receive(self, seconds: float) -> list[Written | Failed | Committed]:
        """Return the answers that are there, and wait for the first one for some time.

        Raises:
            WriterEndedError: the writer has ended, and this is the first call that finds it.
        """
        answers: list[Written | Failed | Committed] = []
        connection = self._connection
        if connection is None:
            time.sleep(min(seconds, 0.01))  # the next save connects
            return []
        try:
            while connection.poll(0 if answers else seconds):
                answers.append(connection.recv())
        except (EOFError, OSError):
            if not answers:  # otherwise the next call finds it
                self._lost(connection)
        return answers

    def end(self) -> str:
        """End a writer that does not answer, and return how it ended; the next save starts it again."""
        if self._process is not None:
            self._process.kill()
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None
            return self._why("")

    def close(self) -> None:
        """Close the connection; the process ends when all ranks have done so."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def _lost(self, connection: Connection) -> None:
        """Note that the writer at the other end has ended.

        Raises:
            WriterEndedError: unless a save was delivered to another one since.
        """
        with self._lock:
            if self._connection is connection:
                connection.close()
                self._connection = None
                raise WriterEndedError(self._why("the writer process ended"))

    def _connect(self, patient: Callable[[], bool] = lambda: True) -> Connection:
        """Connect, and introduce this rank."""
        connection = self._started(patient) if self._process is None else self._process.connect()
        connection.send(self._member)
        if self._files:
            handover.send_files(connection, self._files)
        return connection

    def _started(self, patient: Callable[[], bool]) -> Connection:
        """Connect to the writer that another rank starts."""
        deadline = time.monotonic() + _CONNECT
        while True:
            try:
                return handover.connect(self._address)
            except (ConnectionRefusedError, FileNotFoundError):
                if time.monotonic() > deadline or not patient():
                    raise WriterEndedError("the writer process is not there") from None
                time.sleep(0.05)

    def _why(self, event: str) -> str:
        """What happened to the writer, with the end of its process on the rank that has started it."""
        return event if self._process is None else f"{event} ({self._process.reason()})".strip()
