"""Is a token shard the file that stage=tokenize wrote? Its path, its manifest entry, and checks of size and checksum."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pipeline.common.atomic_files import verify
from pipeline.common.errors import UserError, Violation
from pipeline.data.load.retries import Retries, UnreadableFile


@dataclass(frozen=True)
class Shard:
    """A token shard: its path, and its entry in the manifest. The file format is documented in pipeline/data/tokenize/token_shards.py.

    Attributes:
        made_as: the configuration key of the folder, and what writes it.
    """

    path: Path
    entry: dict[str, Any]
    made_as: tuple[str, str] = ("data.tokens", "stage=tokenize")

    @property
    def fix(self) -> str:
        """The fix that error messages suggest for a missing or damaged shard."""
        return f"remove {self.path.parent} and run {self.made_as[1]} again"

    def of_bytes(self, name: str) -> Shard:
        """Return the shard with other bytes of it in place of its tokens: entry[name] of them, from entry[name_offset] on."""
        fields = {"dtype": "uint8", "tokens": self.entry[name], "offset": self.entry.get(f"{name}_offset", 0)}
        return replace(self, entry={**self.entry, **fields})

    def check_size(self, size: int | None) -> Violation | None:
        """Compare a file size, None for a missing file, with the manifest."""
        written = self.entry["bytes"]
        if size == written:
            return None
        rule = "is missing" if size is None else f"is truncated or overwritten: {size} bytes, {written} were written"
        return Violation(self.made_as[0], self.path, rule, self.fix)

    def verify(self) -> None:
        """Read the full file and compare its size and checksum with the manifest.

        Raises:
            UserError: the shard is missing, truncated or corrupt.
        """
        verify(self.path, self.entry["bytes"], self.entry["xxh3"], self.fix)


class Verifier:
    """A background thread that verifies shards one by one, while training reads them, and stores the first error.

    The thread is a daemon, so that a job does not wait for pending verifications at exit.

    Attributes:
        verified: the numbers of the shards that are verified.
    """

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        self.verified: set[int] = set()
        self._shards: SimpleQueue[tuple[int, Shard]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._pending = 0
        self._error: Exception | None = None

    def add(self, number: int, shard: Shard) -> None:
        """Queue a shard for verification."""
        with self._changed:
            self._pending += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, daemon=True, name="verify")
                self._thread.start()
        self._shards.put((number, shard))

    def check(self) -> None:
        """Raise the first error found so far, without waiting.

        Raises:
            UserError: a shard is truncated or corrupt; the message names it.
            UnreadableFile: a shard is missing or cannot be read, for a minute.
        """
        if self._error is not None:
            raise self._error

    def finish(self, seconds: float | None = None) -> None:
        """Wait until all queued shards are verified, at most `seconds`, then check."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending == 0, seconds)
        self.check()

    @staticmethod
    def _verify(shard: Shard) -> None:
        """Verify a shard. One that is missing is an OSError: it may come back."""
        shard.path.stat()
        shard.verify()

    def _work(self) -> None:
        while True:
            number, shard = self._shards.get()
            try:
                self._retries.read(shard.path, partial(self._verify, shard))
                self.verified.add(number)
            except (UserError, UnreadableFile) as error:
                self._error = self._error or error
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()
