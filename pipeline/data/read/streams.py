"""The bytes of a source: from a local file or a URL, decompressed as they are read."""

from __future__ import annotations

import io
import zlib
from typing import IO, Any

import zstandard

from pipeline.data.read.suffixes import split_compression

BUFFER_BYTES = 1 << 20
_COMPRESSED_BYTES = 1 << 12  # decompressed at once; what comes out of them is held, and may be ten thousand times as much
_GZIP = 31  # zlib's window bits: a gzip header, the largest window


class DamageError(Exception):
    """A stream is damaged or ends too early.

    Attributes:
        position: bytes that could be read before.
    """

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(reason)
        self.position = position


def is_remote(path: str) -> bool:
    """Whether a path is the URL of another place, read through fsspec."""
    return "://" in path


def open_raw(path: str) -> IO[bytes]:
    """The bytes of a local file or a URL as they are stored."""
    if is_remote(path):
        import fsspec

        return fsspec.open(path, "rb").open()
    return open(path, "rb", buffering=BUFFER_BYTES)


def open_bytes(path: str) -> IO[bytes]:
    """The bytes of a local file or a URL, decompressed. Seeks only where nothing is compressed."""
    return decompressed(path, open_raw(path))


def decompressed(name: str, handle: IO[bytes]) -> IO[bytes]:
    """A handle's bytes, decompressed as the ending of the name says.

    Reading from it raises DamageError.
    """
    _, compression = split_compression(name)
    if not compression:
        return handle
    return io.BufferedReader(_Decompressed(handle, compression), BUFFER_BYTES)


class UntilDamage(io.RawIOBase):
    """A stream for a library that drops what it has buffered when reading raises: it ends at the damage.

    Attributes:
        damage: what was met; None if nothing.
    """

    def __init__(self, handle: IO[bytes]) -> None:
        # One read of what is below: more would lose what the first of them brought.
        self._readinto = handle.readinto1 if isinstance(handle, io.BufferedReader) else handle.readinto  # type: ignore[attr-defined]
        self._position = 0
        self.damage: DamageError | None = None

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a part of the buffer; returns how many bytes."""
        try:
            count = self._readinto(buffer)
        except DamageError as error:
            self.damage = error
            return 0
        self._position += count
        return count

    def tell(self) -> int:
        """Bytes read so far."""
        return self._position


class _Decompressed(io.RawIOBase):
    """A compressed stream of any number of members or frames.

    gzip.GzipFile drops what it has decompressed when it meets damage; zstandard's reader takes a frame that stops early for a whole one.
    """

    def __init__(self, handle: IO[bytes], compression: str) -> None:
        self._handle, self._compression = handle, compression
        self._decompressor: Any = None  # of one gzip member or Zstandard frame: zlib's and zstandard's have one interface
        self._compressed = b""
        self._pending = memoryview(b"")
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            if not self._refill():
                return 0
        count = min(len(buffer), len(self._pending))
        buffer[:count], self._pending = self._pending[:count], self._pending[count:]
        self._position += count
        return count

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        self._handle.close()
        super().close()

    def _refill(self) -> bool:
        """Decompress a little more; False at the end of the stream."""
        compressed = self._compressed or self._handle.read(_COMPRESSED_BYTES)
        self._compressed = b""
        if not compressed:
            if self._decompressor is not None:
                raise DamageError(self._position, f"the file ends within its {self._compression} data")
            return False
        if self._decompressor is None:
            if self._position and not compressed.strip(b"\0"):
                return True  # tapes pad with zeros
            self._decompressor = zlib.decompressobj(_GZIP) if self._compression == "gzip" else zstandard.ZstdDecompressor().decompressobj()
        try:
            self._pending = memoryview(self._decompressor.decompress(compressed))
        except (zlib.error, zstandard.ZstdError) as error:
            raise DamageError(self._position, str(error)) from error
        if self._decompressor.eof:
            self._compressed = self._decompressor.unused_data
            self._decompressor = None
        return True
