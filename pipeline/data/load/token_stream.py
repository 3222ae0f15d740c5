"""Which bytes of which shard hold a range of tokens? Reads the concatenated shards by file offset; nothing is mapped, loaded or indexed."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NoReturn

import numpy as np

from pipeline.common.errors import UserError, Violation
from pipeline.data.load.removal import Removal
from pipeline.data.load.retries import Retries
from pipeline.data.load.shard_checksums import Shard, Verifier

OPEN_SHARDS = max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
"""Maximum number of open shards: half of the process' limit on open files."""

STAT_THREADS = 16
"""Concurrent stat calls: a parallel file system has a high latency per call, but serves many calls in parallel."""


class _OpenShard:
    """An open file, closed when its last reference is dropped, so that eviction does not close it during a read."""

    def __init__(self, shard: Shard) -> None:
        self.fd = -1
        self.fd = os.open(shard.path, os.O_RDONLY)
        if violation := shard.check_size(os.fstat(self.fd).st_size):
            raise UserError([violation])

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class TokenStream:
    """The concatenated tokens of an ordered list of shards.

    Reads are thread-safe and release the GIL while they wait for the file system.

    Attributes:
        read_shards: (shards,) bool, the shards that this process has opened.
        removal: documents that are read as end-of-document tokens; None for none.
        dtype: of the tokens on disk, little-endian.
    """

    def __init__(self, shards: Sequence[Shard], *, lazy_checks: bool = False, share: tuple[int, int] = (0, 1), streams: int = 1) -> None:
        """Compute the offsets; no file is opened.

        Args:
            shards: in order, all of one dtype.
            lazy_checks: verify the checksum of a shard in a background thread when it is first opened.
            share: (rank, ranks): this process verifies every ranks-th shard, so that a job verifies each shard once.
            streams: number of streams of the same shards, which share the limit on open files.
        """
        entries = [shard.entry for shard in shards]
        self.shards, self.lazy_checks, self.read_shards = shards, lazy_checks, np.zeros(len(shards), dtype=bool)
        # (shards + 1,) position in the stream at which each shard begins, and the end of the last. Then the byte offset of its first token.
        self._starts = np.cumsum([0, *(entry["tokens"] for entry in entries)], dtype=np.int64)
        self._offsets = np.array([entry["offset"] for entry in entries], dtype=np.int64)
        self.tokens = int(self._starts[-1])
        self.dtype = np.dtype(entries[0]["dtype"] if entries else "u2").newbyteorder("<")
        assert all(entry["dtype"] == entries[0]["dtype"] for entry in entries)
        self.removal: Removal | None = None
        self._open: dict[int, _OpenShard] = {}
        self._streams = streams
        self._lock = threading.Lock()
        self._retries = Retries()
        self._verifier = Verifier(self._retries)
        self._share = range(share[0], len(shards), share[1])
        self._unverified = set(self._share) if lazy_checks else set()

    def read(self, positions: np.ndarray, length: int) -> np.ndarray:
        """Read ranges of equal length.

        Args:
            positions: (n,) int64, the first token of each range in the stream.
            length: tokens per range; every range must end within the stream.

        Returns:
            (n, length) in the stream's dtype.

        Raises:
            UserError: a shard is truncated, or the background verification has found a corrupt one.
            UnreadableFile: a shard is missing or cannot be read, for a minute.
        """
        joined = bytearray().join(self.read_ranges(positions, np.full(len(positions), length)))
        return np.frombuffer(joined, self.dtype).reshape(len(positions), length)

    def read_ranges(self, positions: np.ndarray, lengths: np.ndarray) -> list[bytes]:
        """The bytes of ranges in the stream's dtype: positions of their first tokens, (n,) int64, and tokens of each, (n,) int64.

        Raises the errors of read.
        """
        self._verifier.check()
        shards = np.searchsorted(self._starts, positions, side="right") - 1
        starts = self._offsets[shards] + (positions - self._starts[shards]) * self.dtype.itemsize
        sizes = lengths * self.dtype.itemsize
        try:
            ranges = self._read_at_once(shards, starts, sizes)
        except OSError:  # does not tell its file
            ranges = [b""] * len(shards)
        across = positions + lengths > self._starts[shards + 1]
        short = np.fromiter(map(len, ranges), np.int64, len(ranges)) != sizes
        for row in np.flatnonzero(across | short).tolist():
            ranges[row] = self._read_across_shards(int(shards[row]), int(starts[row]), int(sizes[row]))
        if self.removal is not None:
            self.removal.apply(ranges, positions, lengths)
        return ranges

    def _read_at_once(self, shards: np.ndarray, starts: np.ndarray, sizes: np.ndarray) -> list[bytes]:
        """Read ranges by one pread each, without Python bytecode in between: a range of 2,048 tokens takes about a microsecond.

        Args:
            shards: (n,) int64, the shard of each range.
            starts: (n,) int64, byte offset in its file.
            sizes: (n,) int64, bytes; a range that ends in a later shard is not complete.
        """
        distinct, inverse = np.unique(shards, return_inverse=True)
        files = [self._file(shard) for shard in distinct.tolist()]  # these references keep the files open during the reads
        descriptors = np.array([file.fd for file in files], dtype=np.int64)[inverse]
        return list(map(os.pread, descriptors.tolist(), sizes.tolist(), starts.tolist()))

    def _read_across_shards(self, shard: int, start: int, size: int) -> bytes:
        """Read a range that may span several shards, and try again where that fails.

        Args:
            start: byte offset in its file.
            size: bytes of the range.
        """
        parts: list[bytes] = []
        while size > 0:
            entry = self.shards[shard].entry
            available = entry["offset"] + entry["tokens"] * self.dtype.itemsize - start
            parts.append(self._retries.read(self.shards[shard].path, partial(self._read_part, shard, start, min(size, available))))
            size -= available
            shard += 1
            start = int(self._offsets[shard]) if size > 0 else 0
        return b"".join(parts)

    def _read_part(self, shard: int, start: int, size: int) -> bytes:
        """Read bytes of a shard, whose file is opened again after an error: a stale handle stays stale."""
        try:
            file = self._file(shard)  # this reference keeps the file open during the read
            content = os.pread(file.fd, size, start)
            if len(content) != size:
                self._raise_short_read(self.shards[shard])
        except OSError:
            with self._lock:
                self._open.pop(shard, None)
            raise
        return content

    def _raise_short_read(self, shard: Shard) -> NoReturn:
        """Raise the error for a file that was truncated while open, or for a read that returned fewer bytes than the file has."""
        if violation := shard.check_size(shard.path.stat().st_size):
            raise UserError([violation])
        raise OSError(errno.EIO, "fewer bytes were read than the file has", shard.path)

    def _file(self, number: int) -> _OpenShard:
        """The open file of a shard, from an LRU cache of this stream's part of OPEN_SHARDS files."""
        with self._lock:
            file = self._open.pop(number, None) or _OpenShard(self.shards[number])
            self._open[number] = file
            self.read_shards[number] = True
            if len(self._open) > OPEN_SHARDS // self._streams:
                del self._open[next(iter(self._open))]
            self._verify_later(number)
        return file

    def _verify_later(self, number: int) -> None:
        """Queue a shard for the background verification, once, if it is in this process' share."""
        if number in self._unverified:
            self._unverified.discard(number)
            self._verifier.add(number, self.shards[number])

    def check_sizes(self) -> None:
        """Compare the size of every shard file with the manifest, so that a run fails at its start and not when it first reads the shard.

        Raises:
            UserError: shards are missing or truncated; the message names all of them.
        """

        def check(shard: Shard) -> Violation | None:
            try:
                return shard.check_size(shard.path.stat().st_size)
            except FileNotFoundError:
                return shard.check_size(None)

        with ThreadPoolExecutor(STAT_THREADS) as pool:
            violations = [violation for violation in pool.map(check, self.shards) if violation]
        UserError.raise_for(violations)

    def verify(self) -> None:
        """Verify the checksum of every shard in this process' share.

        Raises:
            UserError: a shard is corrupt; the message names it.
        """
        for number in self._share:
            self.shards[number].verify()

    def wait_verified(self, read: np.ndarray | None = None, seconds: float | None = None) -> np.ndarray:
        """Wait for the background verification of the shards in this process' share that have been opened. Raises the errors of verify.

        Args:
            read: (shards,) bool, shards that any process has opened; default: those that this process has opened.
            seconds: maximum time to wait; default: until all are verified.

        Returns:
            (shards,) bool, the shards that this process has verified.
        """
        with self._lock:
            for number in np.flatnonzero(self.read_shards if read is None else read).tolist():
                self._verify_later(number)
        self._verifier.finish(seconds)
        verified = np.zeros(len(self.shards), dtype=bool)
        verified[list(self._verifier.verified)] = True
        return verified
