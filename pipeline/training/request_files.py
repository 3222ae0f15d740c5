"""Files by which a user asks a running job for something: `touch RUN/save` and `touch RUN/stop`. Only rank 0 looks for them."""

from __future__ import annotations

import logging
import time
from pathlib import Path

log = logging.getLogger("pipeline")

SAVE, STOP = "save", "stop"
#: Seconds between two looks: each is a request to the metadata server of a parallel file system.
INTERVAL = 1.0


class RequestFiles:
    """Looks for the files of a run directory, and removes each when what it asks for is done.

    A directory that cannot be read has no files.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._looked = float("-inf")
        self._save_asked = self._stop_asked = False
        self._saved_by: int | None = None

    def look(self) -> tuple[bool, bool]:
        """Return whether a checkpoint was asked for since the last call, and whether the run was asked to stop."""
        now = time.monotonic()
        if now - self._looked < INTERVAL:
            return False, self._stop_asked
        self._looked = now
        if not self._stop_asked and _is_file(self._run_dir / STOP):
            self._stop_asked = True
            log.info("%s: the run stops after a checkpoint", self._run_dir / STOP)
        asked = not self._save_asked and _is_file(self._run_dir / SAVE)
        if asked:
            self._save_asked = True
            log.info("%s: a checkpoint is written", self._run_dir / SAVE)
        return asked, self._stop_asked

    def saving(self, step: int) -> None:
        """Note that a checkpoint of a step has begun."""
        if self._save_asked and self._saved_by is None:
            self._saved_by = step

    def complete(self, step: int) -> None:
        """Remove the file `save` if the complete checkpoint of a step, or a later one than it asked for, is what it asked for."""
        if self._saved_by is not None and step >= self._saved_by:
            remove(self._run_dir / SAVE)
            self._save_asked, self._saved_by = False, None

    def stopped(self) -> None:
        """Remove the file `stop`, if it was seen: the run ends."""
        if self._stop_asked:
            remove(self._run_dir / STOP)


def remove(path: Path) -> None:
    """Remove a file, if there is one; one that cannot be removed is logged."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("%s: cannot be removed: %s", path, error.strerror)


def _is_file(path: Path) -> bool:
    """Whether there is a file; not if the file system cannot tell."""
    try:
        return path.is_file()
    except OSError:
        return False
