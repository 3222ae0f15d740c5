"""Reads of a file system that fails for a moment: tried again for a minute, logged once, and ended with the first failure."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pipeline.common.errors import RunFailed, Violation
from pipeline.common.remote import RemotePath, Unreachable

log = logging.getLogger("pipeline")

#: Seconds between two attempts: a minute in all, in which a server of the file system fails over or a mount comes back.
WAITS = (0.5, 1.0, 2.0, 4.0, 7.5, 15.0, 30.0)

Result = TypeVar("Result")


class UnreadableFile(RunFailed):
    """A file that could not be read for a minute.

    Attributes:
        since: when its first attempt failed, on the clock time.monotonic, seconds.
        samples: first and last sample for which it was to be read; None if they are not known.
    """

    def __init__(self, path: Path | RemotePath, error: OSError | Unreachable, since: float) -> None:
        self.since = since
        self.samples: tuple[int, int] | None = None
        self._path, self._rule = path, f"cannot be read: {error.strerror or error} (tried for {time.monotonic() - since:.0f} s)"
        super().__init__(str(path))

    def __str__(self) -> str:
        where = "" if self.samples is None else " for samples {} to {}".format(*self.samples)
        fix = "restore the file or its file system, and run the same command again, which continues from the newest checkpoint"
        return str(Violation("data.tokens", self._path, f"{self._rule}{where}", fix))


class Retries:
    """Attempts to read files from several threads. When one of them gives up, the others do."""

    def __init__(self) -> None:
        self._given_up = threading.Event()
        self._lock = threading.Lock()
        self._failing: set[str] = set()

    def read(self, path: Path | RemotePath, attempt: Callable[[], Result]) -> Result:
        """Return what an attempt to read a file returns.

        Args:
            attempt: opens and reads the file; must not keep it open when it fails.

        Raises:
            UnreadableFile: it failed for a minute, or until a read in another thread had failed for a minute.
        """
        since = time.monotonic()
        for wait in (*WAITS, None):
            try:
                result = attempt()
            except (OSError, Unreachable) as error:
                self._log_once(str(path), error)
                if wait is None or self._given_up.wait(wait):
                    self._given_up.set()
                    raise UnreadableFile(path, error, since) from error
            else:
                self._log_success(str(path), since)
                return result
        raise AssertionError

    def _log_once(self, path: str, error: OSError | Unreachable) -> None:
        """Log the first failure of a file until it can be read again, unless it is not tried again."""
        with self._lock:
            if path in self._failing or self._given_up.is_set():
                return
            self._failing.add(path)
        log.warning("%s: cannot be read (%s): trying again for %.0f s", path, error.strerror or error, sum(WAITS))

    def _log_success(self, path: str, since: float) -> None:
        """Log that a file that failed can be read again."""
        with self._lock:
            if path not in self._failing:
                return
            self._failing.discard(path)
        log.info("%s: can be read again, after %.0f s", path, time.monotonic() - since)
