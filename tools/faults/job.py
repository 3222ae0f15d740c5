"""Processes that are traced, what they report, and their states."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import random
import re
import socket
import sys
import threading
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
INJECT = Path(__file__).parent / "inject"


def forked(arguments: list[str], environment: dict[str, str], output: Path) -> BaseProcess:
    """Start `python ARGUMENTS` in a process forked from one that has imported everything; both streams are appended to a file."""
    process = multiprocessing.get_context("forkserver").Process(target=_be_rank, args=(arguments, environment, str(output)))
    process.start()
    return process


def preload() -> None:
    """Begin to import what ranks need, in the process that they are forked from."""
    os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT))
    from multiprocessing import forkserver

    multiprocessing.set_forkserver_preload(["tools.faults.preload"])
    forkserver.ensure_running()


def _be_rank(arguments: list[str], environment: dict[str, str], output: str) -> None:
    """Run `python ARGUMENTS` in this process."""
    import runpy

    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, number in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, number)
    os.environ.clear()
    os.environ.update(environment)
    assert arguments[0] == "-m"
    sys.argv = arguments[1:]
    runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)


class Listener:
    """The socket that traced processes report to.

    Attributes:
        name: of the socket, in the abstract namespace.
        messages: (role, process id, message, connection) in the order of arrival.
    """

    def __init__(self) -> None:
        self.name = f"chaos-{os.getpid()}-{random.SystemRandom().getrandbits(32)}"
        self.messages: queue.Queue[tuple[str, int, dict[str, Any], socket.socket]] = queue.Queue()
        self._landed: set[str] = set()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        role, pid = "", 0
        with contextlib.suppress(OSError), connection, connection.makefile("r") as lines:
            for line in lines:
                try:
                    message = json.loads(line)
                except ValueError:  # the process was killed in the middle of it
                    return
                if "role" in message:
                    role, pid = message["role"], message["pid"]
                if "landed" in message and message["fault"] in self._landed:  # the process that was started after the fault
                    connection.sendall(b"go on\n")
                    continue
                self._landed.add(message.get("fault", ""))
                self.messages.put((role, pid, message, connection))


@dataclass
class Traced:
    """What processes of all jobs have reported.

    Attributes:
        lines: (role, file, line, phase of tracing.PHASES) -> how often a process executed it, at least.
    """

    lines: dict[tuple[str, str, int, str], int] = field(default_factory=dict)

    def add(self, role: str, message: dict[str, Any]) -> None:
        """Note the lines of a message."""
        if "line" in message:
            file, line, phase = message["line"]
            self.lines.setdefault((role, file, line, phase), 1)
        for file, line, phase, count in message.get("counts", []):
            self.lines[role, file, line, phase] = max(count, self.lines.get((role, file, line, phase), 1))


def processes_of(name: str) -> list[int]:
    """Process ids on this machine that were started for this listener, by their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if f"CHAOS_SOCKET={name}".encode() in (folder / "environ").read_bytes() and is_alive(int(folder.name)):
                    found.append(int(folder.name))
    return found


def process_state(pid: int) -> str:
    """The state of a process as in `ps`; X without it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    return process_state(pid) not in "ZX"


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler of a signal."""
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)
    return False


def free_port() -> int:
    """A port that is free, below those that the kernel chooses from."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
