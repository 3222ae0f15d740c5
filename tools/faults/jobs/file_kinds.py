"""Faults of files and ports."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from contextlib import suppress

from pipeline.common.ranks import FIRST_PORT, PORTS
from tools.faults.job import is_alive
from tools.faults.jobs import cases
from tools.faults.jobs.disk import Disk, damage
from tools.faults.jobs.kind import Kind

_SAVING = ("mid-step", "staging", "writing", "committing", "validation")


class DiskFull(Kind):
    """The file system of the run directory is full, until the run has noticed it."""

    moments = (*_SAVING, "finishing")
    settings = ("checkpoint.max_failures=100",)  # steps take milliseconds
    inodes = False
    _until = 0.0

    def prepare(self) -> None:
        """Mount it."""
        self._disk = Disk(self.scene.disk)

    def strike(self) -> None:
        """Fill it."""
        self._disk.fill(inodes=self.inodes)
        self._until = time.monotonic() + 20

    def look(self) -> None:
        """Look for it in the log; free the space then, or after 20 s."""
        found = re.search(r".*(?:No space left|could not be written|[Dd]isk full).*", self.scene.new_log())
        self.evidence = self.evidence or ("" if found is None else found[0].strip()[-60:])
        if self._until and (self.evidence or time.monotonic() > self._until):
            self._disk.free()
            self._until = 0.0

    def may_end(self, state: str, code: str) -> bool:
        """After the last checkpoint of a run, which cannot wait for space."""
        return (state, code) == ("FAILED", "2:0") and "trying once more to write the checkpoint" in self.scene.new_log()

    def undo(self) -> None:
        """Unmount it."""
        self._disk.remove()


class InodesFull(DiskFull):
    """No file can be created, until the run has noticed it, as with a quota of files."""

    inodes = True


class DamagedCheckpoint(Kind):
    """The newest checkpoint is torn, and all ranks are killed."""

    moments = ("mid-step", "staging", "validation")
    late = True
    settings = ("checkpoint.skip_damaged=true",)

    def strike(self) -> None:
        """Damage it, and kill the ranks before they hand over a newer one."""
        scene, alive = self.scene, [rank.pid for rank in self.scene.ranks.values() if is_alive(rank.pid)]
        scene.wait(lambda: not list((scene.run_dir / "checkpoints").glob(".step-*")), 3)  # one that is written now would be newer
        scene.note_fault()
        if alive:
            self.evidence = damage(scene.run_dir, scene.chance)
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            scene.complete = scene.complete_before

    def completed(self) -> None:
        """It counts only if the run has read it: a writer process that goes on may have written the file again."""
        if not re.search(r"renamed a damaged checkpoint to|\w+.json is not readable", self.scene.new_log()):
            self.evidence = ""


class PortTaken(Kind):
    """Another process listens on the port of rank 0."""

    moments = (cases.SUBMISSION,)
    _socket: socket.socket | None = None

    def submitted(self) -> None:
        """Listen on the port that pipeline/common/ranks.py derives."""
        port = FIRST_PORT + (16 * self.scene.job + self.scene.step_id) % PORTS
        self._socket = socket.create_server(("0.0.0.0", port), backlog=64)
        self._socket.setblocking(False)

    def look(self) -> None:
        """See whether a rank has connected, or could not listen."""
        assert self._socket is not None
        with suppress(BlockingIOError):
            connection, _ = self._socket.accept()
            connection.close()
            self.evidence = "a rank has connected to the other process"
        if re.search(r"EADDRINUSE|[Aa]ddress already in use", self.scene.new_log()):
            self.evidence = "address already in use"

    def undo(self) -> None:
        """Close it."""
        if self._socket is not None:
            self._socket.close()
