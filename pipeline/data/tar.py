"""Plain USTAR archives with nothing in their headers that depends on who wrote them or when.

tarfile and webdataset's writer spend most of their time on headers, and PAX headers would double the size of short documents.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipeline.data.read.streams import BUFFER_BYTES, DamageError

BLOCK = 512
MAX_MEMBER_BYTES = 8**11 - 1  # eleven octal digits: 8 GiB

# https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html#tag_20_92_13_06, "ustar Interchange Format"
_BEFORE_SIZE = b"0000644\0" + b"0000000\0" * 2  # mode, uid, gid
_AFTER_SIZE = b"00000000000\0"  # modification time
_AFTER_CHECKSUM = (b"0" + bytes(100) + b"ustar\x0000").ljust(BLOCK - 156, b"\0")  # a file, no link, no names of owners


def member(name: str, data: bytes) -> bytes:
    """One file of an archive: header, content, padding to whole blocks.

    Args:
        name: ASCII, at most 100 characters.
    """
    return b"".join((header(name, len(data)), data, padding(len(data))))


def header(name: str, size: int) -> bytes:
    """The block before a file's content.

    Args:
        name: ASCII, at most 100 characters.
        size: bytes of the content.
    """
    encoded = name.encode("ascii")
    assert len(encoded) <= 100
    assert size <= MAX_MEMBER_BYTES
    before = encoded.ljust(100, b"\0") + _BEFORE_SIZE + b"%011o\0" % size + _AFTER_SIZE
    checksum = sum(before) + 8 * ord(" ") + sum(_AFTER_CHECKSUM)
    return b"".join((before, b"%06o\0 " % checksum, _AFTER_CHECKSUM))


def padding(size: int) -> bytes:
    """What fills the last block of a file's content."""
    return bytes(-size % BLOCK)


END = bytes(2 * BLOCK)
"""What closes an archive."""


def members(archive: Path | IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """The (name, content) pairs of an archive that was written here, in order.

    Args:
        archive: a file's path, or the buffered file itself, which is read from where it stands and left open.

    Raises:
        EOFError: it ends within a member.
    """
    if isinstance(archive, Path):
        with open(archive, "rb", buffering=1 << 20) as handle:
            yield from members(handle)
        return
    while (block := _read(archive, BLOCK))[0]:
        size = int(block[124:135], 8)
        yield block[:100].rstrip(b"\0").decode("ascii"), _read(archive, size)
        _read(archive, -size % BLOCK)


def _read(handle: IO[bytes], size: int) -> bytes:
    data = handle.read(size)
    if len(data) < size:
        raise EOFError(f"{getattr(handle, 'name', 'the archive')} ends within a member")
    return data


@dataclass(frozen=True, slots=True)
class Member:
    """A file in an archive: its name, the byte at which its content begins, and its size."""

    name: str
    offset: int
    size: int


class Archive:
    """The files of anybody's archive (USTAR, PAX or GNU), once from front to back, with bounded memory.

    tarfile finds the members, but takes damage in the middle of an archive, and its sudden end, for the end.
    """

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle = handle
        self._position = 0
        self._left = 0  # bytes of the member at hand
        self._padding = 0

    def __iter__(self) -> Iterator[Member]:
        """The members; what is not read of one is passed over.

        Raises:
            DamageError: the archive is damaged or has no end.
        """
        extended: dict[str, str] = {}  # what extended headers say of the member after them
        while (header := self._exactly(BLOCK)).strip(b"\0"):
            try:
                info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
                if info.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                    extended |= self._extended(info)
                    continue
                size = int(extended.get("size", info.size)) if info.isreg() else 0
            except (tarfile.HeaderError, ValueError) as error:
                raise DamageError(self._position - BLOCK, f"no header of a tar member: {error}") from error
            self._left, self._padding = size, -size % BLOCK
            if info.isreg():
                yield Member(extended.get("path", info.name), self._position, size)
            extended = {}
            while self.read(BUFFER_BYTES):
                pass
            self._exactly(self._padding)

    def read(self, limit: int) -> bytes:
        """The next bytes of the member at hand, at most `limit`; none at its end."""
        data = self._exactly(min(limit, self._left))
        self._left -= len(data)
        return data

    def content(self) -> io.BufferedReader:
        """The member at hand as a file."""
        return io.BufferedReader(_Content(self), BUFFER_BYTES)

    def _extended(self, info: tarfile.TarInfo) -> dict[str, str]:
        """What a header that only describes the next member says of it."""
        if info.size > BUFFER_BYTES:
            raise ValueError("an extended header is too long")
        raw = self._exactly(info.size + -info.size % BLOCK)[: info.size]
        if info.type == tarfile.GNUTYPE_LONGNAME:
            return {"path": raw.rstrip(b"\0").decode("utf-8", "surrogateescape")}
        fields = {}
        while info.type == tarfile.XHDTYPE and raw:
            length = int(raw.partition(b" ")[0])
            if length <= 0:
                raise ValueError("an extended header is damaged")
            key, _, value = raw[:length].partition(b" ")[2].rstrip(b"\n").decode("utf-8", "surrogateescape").partition("=")
            fields[key] = value
            raw = raw[length:]
        return fields

    def _exactly(self, size: int) -> bytes:
        data = self._handle.read(size)
        self._position += len(data)
        if len(data) < size:
            raise DamageError(self._position, "the archive ends too early")
        return data


class _Content(io.RawIOBase):
    """The member that an archive stands at."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._archive.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
