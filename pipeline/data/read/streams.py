"""Byte streams of input files: local or remote, decompressed while they are read."""

from __future__ import annotations

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import IO, Any

import zstandard

from pipeline.data.read.suffixes import split_compression

BUFFER_BYTES = 1 << 20
_COMPRESSED_BYTES = 1 << 12  # decompressed at once; of gzip and Zstandard the result may be ten thousand times as large
_GZIP = 31  # zlib window bits: gzip header, largest window
_XZ_MEMORY = 1 << 30  # bytes that a file may demand of its reader; the largest dictionary of a preset of xz is 64 MB

_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(_GZIP),
    "zstd": lambda: zstandard.ZstdDecompressor().decompressobj(),
    "bzip2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, _XZ_MEMORY),
}
"""Compression -> an object for one gzip member, Zstandard frame, bzip2 or xz stream, all with the same interface."""


class DamageError(Exception):
    """A stream is damaged or truncated.

    Attributes:
        position: bytes read before the damage.
        stored: stored bytes read before the damage; 0 if they are unknown, or if the stream ends early.
    """

    def __init__(self, position: int, reason: str, stored: int = 0) -> None:
        super().__init__(reason)
        self.position, self.stored = position, stored


def is_remote(path: str) -> bool:
    """Whether a path is a URL, which is read through fsspec."""
    return "://" in path


def open_raw(path: str) -> IO[bytes]:
    """Open a local file or a URL without decompression."""
    if is_remote(path):
        import fsspec

        return fsspec.open(path, "rb").open()
    return open(path, "rb", buffering=BUFFER_BYTES)


def open_bytes(path: str) -> IO[bytes]:
    """Open a local file or a URL with decompression. Only uncompressed streams are seekable."""
    return decompressed(path, open_raw(path))


def decompressed(name: str, handle: IO[bytes]) -> IO[bytes]:
    """Wrap a handle to decompress it according to the suffix of the name.

    Reading from a compressed stream may raise DamageError.
    """
    _, compression = split_compression(name)
    if not compression:
        return handle
    return io.BufferedReader(_Decompressed(handle, compression), BUFFER_BYTES)


class UntilDamage(io.RawIOBase):
    """A stream that ends at damage instead of raising, for libraries that drop their buffer when a read raises.

    Attributes:
        damage: the damage; None if there was none.
    """

    def __init__(self, handle: IO[bytes]) -> None:
        # At most one read of the underlying stream per call: if a second one raised, the data of the first would be lost.
        self._readinto = handle.readinto1 if isinstance(handle, io.BufferedReader) else handle.readinto  # type: ignore[attr-defined]
        self._position = 0
        self.damage: DamageError | None = None

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a part of the buffer; return the number of bytes."""
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
    """Decompresses a stream of any number of gzip members, Zstandard frames, bzip2 or xz streams.

    gzip.GzipFile drops its decompressed data on damage; the zstandard reader accepts a truncated frame as complete.
    """

    def __init__(self, handle: IO[bytes], compression: str) -> None:
        self._handle, self._compression = handle, compression
        self._decompressor: Any = None
        self._compressed = b""
        self._pending = memoryview(b"")
        self._position = self._stored = 0

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
        """Decompress the next chunk; return False at the end of the stream."""
        stored = self._stored - len(self._compressed)
        pending = not getattr(self._decompressor, "needs_input", True)  # more of the output than was asked for
        if not (compressed := self._compressed) and not pending:
            compressed = self._handle.read(_COMPRESSED_BYTES)
            self._stored += len(compressed)
        self._compressed = b""
        if not compressed and not pending:
            if self._decompressor is not None:
                raise DamageError(self._position, f"the file ends within its {self._compression} data")
            return False
        if self._decompressor is None:
            if self._position and not (compressed := compressed.lstrip(b"\0")):
                return True  # zero padding is valid after a member (gzip on tapes) and between streams (xz)
            self._decompressor = _DECOMPRESSORS[self._compression]()
        try:
            # One byte of bzip2 may be a million bytes of text: its output, and that of xz, is limited.
            limit = (BUFFER_BYTES,) if self._compression in ("bzip2", "xz") else ()
            self._pending = memoryview(self._decompressor.decompress(compressed, *limit))
        except (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError) as error:  # OSError: of bzip2
            raise DamageError(self._position, str(error), stored) from error
        if self._decompressor.eof:
            self._compressed = self._decompressor.unused_data
            self._decompressor = None
        return True
