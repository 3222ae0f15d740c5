"""Faults of files and ports."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from pipeline.checkpoint import native
from pipeline.common.ranks import FIRST_PORT, PORTS
from tools.faults.job import is_alive
from tools.faults.jobs.kind import SUBMISSION, Kind


class Disk:
    """A small file system in memory, mounted at a folder until `remove`.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._filler = folder, folder / "other-files"
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m,nr_inodes=2000", "chaos", str(folder)], check=True)

    def fill(self, *, inodes: bool) -> None:
        """Use all of its bytes, or all of its inodes."""
        self._filler.mkdir()
        with suppress(OSError):
            if inodes:
                for number in itertools.count():
                    (self._filler / str(number)).touch()
            with open(self._filler / "bytes", "wb", buffering=0) as file:
                for size in (1 << 20, 4096, 1):
                    with suppress(OSError):
                        while file.write(bytes(size)):
                            pass

    def free(self) -> None:
        shutil.rmtree(self._filler, ignore_errors=True)

    def remove(self) -> None:
        """Unmount it; its files are copied to the folder."""
        copy = self._folder.with_name("copy")
        shutil.copytree(self._folder, copy, symlinks=True, ignore=shutil.ignore_patterns(self._filler.name))
        subprocess.run(["umount", "--lazy", str(self._folder)], check=True)
        self._folder.rmdir()
        copy.rename(self._folder)


def damage(run_dir: Path, chance: random.Random) -> str:
    """Damage the newest of at least two complete checkpoints; return how, empty without two."""
    complete = native.complete(run_dir)
    if len(complete) < 2:
        return ""
    newest = complete[-1]
    data = max((path for path in newest.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
    how = chance.choice(["a data file torn", "a byte changed", "index.json torn", "catalog.json torn"])
    if how == "a byte changed":
        with open(data, "r+b") as file:
            file.seek(data.stat().st_size // 2)
            old = file.read(1)
            file.seek(-1, 1)
            file.write(bytes([old[0] ^ 0xFF]))
    else:
        files = {
            "a data file torn": data,
            "index.json torn": newest / native.INDEX,
            "catalog.json torn": run_dir / "checkpoints" / "catalog.json",
        }
        with open(files[how], "r+b") as file:
            file.truncate(files[how].stat().st_size // 2)
    return f"step {native.step_of(newest)}, {how}"


_SAVING = ("mid-step", "staging", "writing", "committing", "validation")


class DiskFull(Kind):
    """The file system of the run directory is full, until the run has noticed it."""

    moments = (*_SAVING, "finishing")
    settings = ("checkpoint.max_failures=100",)  # steps take milliseconds
    inodes = False
    _until = 0.0

    def prepare(self) -> None:
        self._disk = Disk(self.scene.disk)

    def strike(self) -> None:
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

    moments = (SUBMISSION,)
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
        if self._socket is not None:
            self._socket.close()
