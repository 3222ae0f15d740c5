"""Byte streams of input files: local or remote, decompressed while they are read."""

from __future__ import annotations

import bz2
import io
import lzma
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import zstandard

from pipeline.common.remote import is_remote
from pipeline.data.read.suffixes import split_compression

BUFFER_BYTES = 1 << 20
_COMPRESSED_BYTES = 1 << 12  # decompressed at once; of gzip and Zstandard the result may be ten thousand times as large
_HEAD = 32  # at least so many bytes at the beginning of a member: its header is needed as a whole
_GZIP = 31  # zlib window bits: gzip header, largest window
_MEMORY = 2 << 30  # bytes that a file may demand of its reader; as much as `zstd --long=31` does

_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gzip": lambda: zlib.decompressobj(_GZIP),
    "zstd": lambda: zstandard.ZstdDecompressor(max_window_size=_MEMORY).decompressobj(),
    "bzip2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, _MEMORY),
}
"""Compression -> an object for one gzip member, Zstandard frame, bzip2 or xz stream, all with the same interface."""


MAGIC = {"gzip": b"\x1f\x8b\x08", "zstd": b"\x28\xb5\x2f\xfd", "bzip2": b"BZh", "xz": b"\xfd7zXZ\0"}
"""Compression -> how a member begins."""


class DamageError(Exception):
    """A stream is damaged or truncated.

    Attributes:
        position: bytes of data before the damage.
        lost: stored bytes that cannot be read; None if they are unknown.
    """

    problem = "is damaged or truncated"

    def __init__(self, position: int, reason: str, lost: int | None = None) -> None:
        super().__init__(reason)
        self.position, self.lost = position, lost


class CheckError(DamageError):
    """Compressed data cannot be decompressed, or its check fails: what was read behind `position` is not data."""


class LimitError(CheckError):
    """Compressed data need too much memory."""

    problem = f"needs more than {_MEMORY >> 30} GB of memory to be decompressed"


class CutError(CheckError):
    """A file ends within its compressed data."""


@dataclass
class Section:
    """A range of a compressed file; see pipeline.data.read.reader.

    Attributes:
        stored: where its first member begins in the file, bytes.
        position: where that begins in the data of the file, bytes.
        end: where it ends in the data; None at the end of the file, or at the first damage.
        damage: what a stream raises at `end`.
        damaged: the member behind `end`, as a section up to the damage.
        unchecked: set by the stream if a member has no check: xz and Zstandard leave it to the writer.
    """

    stored: int = 0
    position: int = 0
    end: int | None = None
    damage: CheckError | None = None
    damaged: Section | None = None
    unchecked: bool = False


def open_raw(path: str) -> IO[bytes]:
    """Open a local file or a URL without decompression. The file is seekable: that of a server without ranges is a temporary copy."""
    if not is_remote(path):
        return open(path, "rb", buffering=BUFFER_BYTES)
    from fsspec.core import url_to_fs

    system, name = url_to_fs(path)
    handle = system.open(name, "rb")
    try:
        handle.seek(-1, io.SEEK_END)
        handle.read(1)
        handle.seek(0)
    except (ValueError, TypeError):  # without ranges, or without a size
        handle = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115, closed by the reader
        system.get_file(name, handle)
        handle.seek(0)
    return io.BufferedReader(handle, BUFFER_BYTES)  # files of fsspec lack arguments of some methods


@contextmanager
def open_bytes(path: str, section: Section | None = None) -> Iterator[IO[bytes]]:
    """Open a local file or a URL with decompression according to its suffix. Only uncompressed streams are seekable.

    A compressed file is read to its end, also if the body is left before: the check of a member is behind its data.

    Args:
        section: of a compressed file; default: up to the first damage.

    Raises:
        CheckError: by reading, or at the end; documents behind its position must not be used.
    """
    compression, failure, section = split_compression(path)[1], None, section or Section()
    with open_raw(path) as raw:
        if not compression:
            yield raw
            return
        raw.seek(section.stored)
        with io.BufferedReader(Decompressed(raw, compression, section), BUFFER_BYTES) as handle:
            try:
                yield handle
            except DamageError as error:  # perhaps of an archive in it, as a consequence of other damage
                failure = error
            while handle.read(BUFFER_BYTES):
                pass
    if failure:
        raise failure


class UntilDamage(io.RawIOBase):
    """A stream that ends at damage instead of raising, for libraries that drop their buffer when a read raises."""

    def __init__(self, handle: IO[bytes]) -> None:
        # At most one read of the underlying stream per call: if a second one raised, the data of the first would be lost.
        self._readinto = handle.readinto1 if isinstance(handle, io.BufferedReader) else handle.readinto  # type: ignore[attr-defined]
        self._position = handle.tell()
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
        """The position in the data."""
        return self._position


class Decompressed(io.RawIOBase):
    """Decompresses a section of any number of gzip members, Zstandard frames, bzip2 or xz streams.

    gzip.GzipFile drops its decompressed data on damage; the zstandard reader accepts a truncated frame as complete.

    Attributes:
        member: where the current member, frame or stream begins: (in the file, in the data), bytes.
        verified: up to where checks were made: (in the file, in the data), bytes.
        complete: members that are read.
    """

    def __init__(self, handle: IO[bytes], compression: str, section: Section) -> None:
        self._handle, self._compression, self._section = handle, compression, section
        self._decompressor: Any = None
        self._compressed = b""
        self._pending = memoryview(b"")
        self._stored, self._position = self.member = self.verified = (section.stored, section.position)
        self._damage: CheckError | None = None
        self.complete = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a part of the buffer; return the number of bytes."""
        if self._damage:
            raise self._damage
        end = self._section.end
        while not self._pending and self._position != end:
            try:
                if not self._refill():
                    return 0
            except CheckError as error:
                self._damage = error
                raise
        if self._position == end and self._section.damage:
            raise self._section.damage
        count = min(len(buffer), len(self._pending), *([] if end is None else [end - self._position]))
        buffer[:count], self._pending = self._pending[:count], self._pending[count:]
        self._position += count
        return count

    def tell(self) -> int:
        """The position in the data."""
        return self._position

    def _refill(self) -> bool:
        """Decompress the next chunk; return False at the end of the stream."""
        pending = not getattr(self._decompressor, "needs_input", True)  # more of the output than was asked for
        compressed, self._compressed = self._compressed, b""
        if not pending and len(compressed) < (_HEAD if self._decompressor is None else 1):
            more = self._handle.read(_COMPRESSED_BYTES)
            self._stored += len(more)
            compressed += more
        if not compressed and not pending:
            if self._decompressor is not None:
                raise CutError(self._position, f"the file ends within its {self._compression} data")
            return False
        if self._decompressor is None:
            if self.complete and not (compressed := compressed.lstrip(b"\0")):
                return True  # zero padding is valid after a member (gzip on tapes) and between streams (xz)
            self._decompressor = _DECOMPRESSORS[self._compression]()
            self.member = (self._stored - len(compressed), self._position)
            # https://datatracker.ietf.org/doc/html/rfc8878#section-3.1.1.1.1, Content_Checksum_flag
            self._section.unchecked |= compressed[:4] == MAGIC["zstd"] and not int.from_bytes(compressed[4:5]) & 4
        try:
            # One byte of bzip2 may be a million bytes of text: its output, and that of xz, is limited.
            limit = (BUFFER_BYTES,) if self._compression in ("bzip2", "xz") else ()
            self._pending = memoryview(self._decompressor.decompress(compressed, *limit))
        except (zlib.error, zstandard.ZstdError, lzma.LZMAError, OSError) as error:  # OSError: of bzip2
            kind = LimitError if "memory" in str(error).lower() else CheckError
            raise kind(self.verified[1], str(error)) from error
        if self._compression == "xz":
            self._section.unchecked |= self._decompressor.check == lzma.CHECK_NONE
        if self._decompressor.eof:
            self._compressed = self._decompressor.unused_data
            self._decompressor = None
            self.complete += 1
        elif self._compression != "bzip2" or not self._decompressor.needs_input:
            return True  # bzip2 has a check for every block, and gives nothing of a block that it has not decompressed as a whole
        self.verified = (self._stored - len(self._compressed), self._position + len(self._pending))
        return True
