"""Puts a job back into the queue when the node of its batch script is lost, or ends it where it may not be requeued.

Slurm does so itself, except in jobs with --no-kill, which spare nodes and a range of nodes need: there it ends the batch script, and the
job holds its other nodes until its time limit, with nothing on them. The next job of a chain begins when this one has ended.

The supervisor starts a deputy on another node, as a step of its own:

    python -m pipeline.launch.deputy JOB HOST PORT RUN_DIR

It listens to the supervisor, and requeues or cancels the job when it has heard nothing for SILENCE seconds. Loads no torch.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.common import events
from pipeline.launch import allocation, slurm

log = logging.getLogger("pipeline")

#: Seconds between two signs of life, and without one after which the supervisor counts as lost.
INTERVAL, SILENCE = 2.0, 45.0
_ALIVE, _END = b".", b"e"
#: Signals that Slurm sends to all steps of a job, and that are meant for the ranks.
_FOR_RANKS = 'trap "" USR1 TERM; exec "$@"'


class Deputy:
    """The supervisor's side: starts the deputy, and tells it that this process is alive.

    Args:
        run_dir: for the event that the deputy writes.
    """

    def __init__(self, job: str, run_dir: Path) -> None:
        self._job, self._run_dir = job, run_dir
        self._server = socket.create_server(("", 0))
        self._connections: list[socket.socket] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._node = ""
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._tell, daemon=True).start()

    @property
    def port(self) -> int:
        """The port on which a deputy connects."""
        port: int = self._server.getsockname()[1]
        return port

    def has_connection(self) -> bool:
        """Whether a deputy listens."""
        return bool(self._connections)

    def watch(self, nodes: Sequence[str], host: str) -> None:
        """Have a deputy on one of the nodes.

        Args:
            nodes: good nodes of the job.
            host: name of this node for the others.
        """
        others = [node for node in nodes if node != host]
        if not others or (self._process is not None and self._process.poll() is None and self._node in others):
            return
        self._node = others[0]
        words = ["srun", "--overlap", "--mem=0", "--gres=none", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", f"--nodelist={self._node}"]
        python = os.environ.get("PIPELINE_PYTHON") or "python"
        words += ["sh", "-c", _FOR_RANKS, "sh", python, "-m", "pipeline.launch.deputy", self._job, host, str(self.port)]
        words.append(str(self._run_dir.absolute()))
        with suppress(OSError):
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def close(self) -> None:
        """Tell the deputy that the job ends."""
        for connection in self._connections:
            with suppress(OSError):
                connection.sendall(_END)

    def _accept(self) -> None:
        while True:
            connection, _ = self._server.accept()
            self._connections.append(connection)

    def _tell(self) -> None:
        while True:
            for connection in list(self._connections):
                try:
                    connection.sendall(_ALIVE)
                except OSError:
                    self._connections.remove(connection)
            time.sleep(INTERVAL)


def listen(host: str, port: int, silence: float = SILENCE) -> bool:
    """Listen to the supervisor until it ends.

    Args:
        silence: seconds without a sign of life after which it counts as lost.

    Returns:
        Whether it said that the job ends; False if it is lost.
    """
    heard = time.monotonic()
    while time.monotonic() - heard < silence:
        try:
            with socket.create_connection((host, port), timeout=10) as connection:
                connection.settimeout(silence)
                while content := connection.recv(64):
                    heard = time.monotonic()
                    if _END in content:
                        return True
        except OSError:
            pass
        time.sleep(0.5)
    return False


def main(job: str, host: str, port: str, run_dir: str) -> int:
    """Wait for the end of the supervisor; if it is lost, requeue the job, or cancel it if that is not allowed."""
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if listen(host, int(port)):
        return 0
    fields = slurm.facts(job)
    if fields.get("JobState") != "RUNNING" or fields.get("Restarts") != (os.environ.get("SLURM_RESTART_COUNT") or "0"):
        return 0
    reason = f"{host}, the node of the batch script, does not answer"
    with suppress(OSError):
        allocation.exclude(Path(run_dir), [host], reason)
    refused = "Requeue=0"
    if fields.get("Requeue", "1") == "1":
        exclude = allocation.excluded_in_queue(Path(run_dir), fields, int(fields.get("NumNodes", "1").partition("-")[0]))
        events.record(Path(run_dir), "requeue_asked", reason=reason)
        if not (refused := slurm.requeue(job)):
            events.record(Path(run_dir), "action", action="requeue", reason=reason, code=1, exclude=exclude)
            slurm.set_excluded(job, exclude)
            return 0
    action = "end" if allocation.next_job(Path(run_dir), job) is None else "chain"
    events.record(Path(run_dir), "action", action=action, reason=f"{reason}; not requeued: {refused}", code=1, exclude=[host])
    slurm.cancel(job)  # ends this process as well
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
