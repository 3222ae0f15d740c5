"""A file system that fills, and checkpoints that are damaged."""

from __future__ import annotations

import itertools
import random
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from pipeline.checkpoint import native


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
        """Remove what `fill` wrote."""
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
