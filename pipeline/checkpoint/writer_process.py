"""Starts the writer process of a node, and tells why it ended. Imports no torch."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

from pipeline.checkpoint import handover

#: Signals that launchers send to announce the end of a job, or to end it; the writer ignores them.
IGNORED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)
#: Seconds that the end of the process is waited for.
_END = 10.0


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
