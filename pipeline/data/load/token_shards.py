"""A token shard and what was noted of it, and a thread that holds shards against their checksums while training already reads them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pipeline.artifact import MANIFEST
from pipeline.errors import UserError, Violation
from pipeline.files import verify


@dataclass(frozen=True)
class Shard:
    """A token shard: where it is, and its entry in the manifest (pipeline/data/tokenize/tokens.py says what it holds)."""

    path: Path
    entry: dict[str, Any]

    @property
    def remedy(self) -> str:
        """What to do when it is not what was written."""
        return f"remove {self.path.parent / MANIFEST} and run stage=tokenize again"

    def fault(self, found: int | None) -> Violation | None:
        """What is wrong with a length in bytes; None stands for a file that is not there."""
        written = self.entry["bytes"]
        if found == written:
            return None
        rule = "is missing" if found is None else f"is truncated or overwritten: {found} bytes, {written} were written"
        return Violation("data.tokens", self.path, rule, self.remedy)

    def verify(self) -> None:
        """Read it whole and compare.

        Raises:
            UserError: it is missing, truncated or corrupt.
        """
        verify(self.path, self.entry["bytes"], self.entry["xxh3"], self.remedy)


class Verifier:
    """Reads whole shards, one after the other, and remembers the first that is not what was written.

    The thread is a daemon: a job that ends does not wait for files that nobody will read again.
    """

    def __init__(self) -> None:
        self._shards: SimpleQueue[Shard] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._waiting = 0
        self._found: Exception | None = None

    def add(self, shard: Shard) -> None:
        """Have a shard verified, after those that were added before."""
        with self._changed:
            self._waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="verify")
                self._thread.start()
        self._shards.put(shard)

    def check(self) -> None:
        """Say what has been found so far.

        Raises:
            UserError: a shard is missing, truncated or corrupt; it is named.
            OSError: one cannot be read.
        """
        if self._found is not None:
            raise self._found

    def finish(self) -> None:
        """Wait for all shards, then check."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting == 0)
        self.check()

    def _work(self) -> None:
        while True:
            shard = self._shards.get()
            try:
                shard.verify()
            except (UserError, OSError) as error:
                self._found = self._found or error
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()
