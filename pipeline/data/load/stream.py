"""The tokens of many shards as one stream, read by offset where they lie: nothing is mapped, loaded or indexed."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import numpy as np

from pipeline.data.load.token_shards import Shard, Verifier
from pipeline.errors import UserError, Violation

OPEN_SHARDS = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
"""Shards that are open at a time: half of the files that the process may open."""

STATS_AT_ONCE = 16
"""Files whose length is asked for at a time: what a parallel file system answers late, it answers side by side."""


class _Open:
    """An open file. It closes when the last reader lets go of it, not before."""

    def __init__(self, shard: Shard) -> None:
        self.fd = -1
        try:
            self.fd = os.open(shard.path, os.O_RDONLY)
        except FileNotFoundError:
            fault = shard.fault(None)
        else:
            fault = shard.fault(os.fstat(self.fd).st_size)
        if fault:
            raise UserError([fault])

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class TokenStream:
    """The tokens of shards, one shard after the other.

    Reading is safe from several threads, and waits for the file system outside the interpreter's lock.

    Attributes:
        shards: in order.
        tokens: length of the stream.
        dtype: of a token on disk, little-endian.
    """

    def __init__(self, shards: Sequence[Shard], *, lazy_checks: bool = False, share: tuple[int, int] = (0, 1)) -> None:
        """Open nothing yet.

        Args:
            shards: in order, all of one dtype.
            lazy_checks: compare a shard with its checksum, in the background, when it is first opened.
            share: (rank, ranks): this process compares every ranks-th shard, so that a job reads each once.
        """
        entries = [shard.entry for shard in shards]
        self.shards = shards
        # Position in the stream at which each shard begins, and the end of the last; offset of its first token in its file.
        self._starts = np.cumsum([0, *(entry["tokens"] for entry in entries)], dtype=np.int64)
        self._offsets = np.array([entry["offset"] for entry in entries], dtype=np.int64)
        self.tokens = int(self._starts[-1])
        self.dtype = np.dtype(entries[0]["dtype"] if entries else "u2").newbyteorder("<")
        assert all(entry["dtype"] == entries[0]["dtype"] for entry in entries)
        self._open: dict[int, _Open] = {}
        self._lock = threading.Lock()
        self._verifier = Verifier()
        self._share = range(share[0], len(shards), share[1])
        self._unverified = set(self._share) if lazy_checks else set()

    def read(self, positions: np.ndarray, length: int) -> np.ndarray:
        """Runs of equal length.

        Args:
            positions: (n,) int64, where in the stream each run begins.
            length: tokens of a run; it must end within the stream.

        Returns:
            (n, length) in the stream's dtype.

        Raises:
            UserError: a shard is missing or truncated, or one that was opened earlier has turned out to be corrupt.
        """
        joined = bytearray().join(self.runs(positions, np.full(len(positions), length)))
        return np.frombuffer(joined, self.dtype).reshape(len(positions), length)

    def runs(self, positions: np.ndarray, lengths: np.ndarray) -> list[bytes]:
        """Runs of any lengths, as they lie on disk; errors as in read.

        Args:
            positions: (n,) int64, where in the stream each run begins.
            lengths: (n,) int64, tokens of each.
        """
        self._verifier.check()
        shards = np.searchsorted(self._starts, positions, side="right") - 1
        starts = self._offsets[shards] + (positions - self._starts[shards]) * self.dtype.itemsize
        sizes = lengths * self.dtype.itemsize
        needed, which = np.unique(shards, return_inverse=True)
        files = [self._file(shard) for shard in needed.tolist()]  # held while they are read, so that they stay open
        descriptors = np.array([file.fd for file in files], dtype=np.int64)[which]
        # One call a run and no line of Python in between: at 2,048 tokens a run is read in about a microsecond.
        runs = list(map(os.pread, descriptors.tolist(), sizes.tolist(), starts.tolist()))
        for run in np.flatnonzero(positions + lengths > self._starts[shards + 1]).tolist():
            runs[run] = self._across(int(shards[run]), int(starts[run]), int(sizes[run]))
        if sum(map(len, runs)) != sizes.sum():
            short = next(run for run, size in enumerate(sizes.tolist()) if len(runs[run]) != size)
            self._say_short(self.shards[shards[short]])
        return runs

    def _across(self, shard: int, start: int, size: int) -> bytes:
        """A run that reaches over the end of a shard, over as many shards as it takes."""
        parts: list[bytes] = []
        while size > 0:
            entry = self.shards[shard].entry
            left = entry["offset"] + entry["tokens"] * self.dtype.itemsize - start
            file = self._file(shard)  # held while it is read, so that it stays open
            parts.append(os.pread(file.fd, min(size, left), start))
            size -= left
            shard += 1
            start = int(self._offsets[shard]) if size > 0 else 0
        return b"".join(parts)

    def _say_short(self, shard: Shard) -> NoReturn:
        """A file has become shorter while it was open, or its file system gave less than it has."""
        if fault := shard.fault(shard.path.stat().st_size):
            raise UserError([fault])
        raise OSError(errno.EIO, "fewer bytes were read than the file has", shard.path)

    def _file(self, number: int) -> _Open:
        """An open shard; the one that was used longest ago makes room."""
        with self._lock:
            file = self._open.pop(number, None) or _Open(self.shards[number])
            self._open[number] = file
            if len(self._open) > OPEN_SHARDS:
                del self._open[next(iter(self._open))]
            if number in self._unverified:
                self._unverified.discard(number)
                self._verifier.add(self.shards[number])
        return file

    def check_sizes(self) -> None:
        """Ask for the length of every shard. One that is missing or truncated would else be noticed only when its turn comes.

        Raises:
            UserError: naming all of them.
        """

        def fault(shard: Shard) -> Violation | None:
            try:
                return shard.fault(shard.path.stat().st_size)
            except FileNotFoundError:
                return shard.fault(None)

        with ThreadPoolExecutor(STATS_AT_ONCE) as pool:
            faults = [found for found in pool.map(fault, self.shards) if found]
        if faults:
            raise UserError(faults)

    def verify(self) -> None:
        """Read every shard of this process' share now and hold it against its checksum.

        Raises:
            UserError: one is corrupt; it is named.
        """
        for number in self._share:
            self.shards[number].verify()

    def verified(self) -> None:
        """Wait until every shard that was opened has been held against its checksum; errors as in verify."""
        self._verifier.finish()
