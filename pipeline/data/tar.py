"""Plain USTAR archives with deterministic headers: no owner, no group, no modification time.

tarfile and the webdataset writer spend most of their time on headers, and PAX headers would double the size of short documents.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipeline.data.read.documents import library_reason
from pipeline.data.read.streams import BUFFER_BYTES, DamageError

BLOCK = 512
MAX_MEMBER_BYTES = 8**11 - 1  # eleven octal digits: 8 GiB

# https://pubs.opengroup.org/onlinepubs/9699919799/utilities/pax.html#tag_20_92_13_06, "ustar Interchange Format"
_BEFORE_SIZE = b"0000644\0" + b"0000000\0" * 2  # mode, uid, gid
_AFTER_SIZE = b"00000000000\0"  # modification time
_AFTER_CHECKSUM = (b"0" + bytes(100) + b"ustar\x0000").ljust(BLOCK - 156, b"\0")  # a regular file, no link, no owner names


def member(name: str, data: bytes) -> bytes:
    """One archive member with a name of at most 100 ASCII characters: header, content, padding to full blocks."""
    return b"".join((header(name, len(data)), data, padding(len(data))))


def header(name: str, size: int) -> bytes:
    """The header block of a member with a name of at most 100 ASCII characters, and `size` bytes of content."""
    encoded = name.encode("ascii")
    assert len(encoded) <= 100
    assert size <= MAX_MEMBER_BYTES
    before = encoded.ljust(100, b"\0") + _BEFORE_SIZE + b"%011o\0" % size + _AFTER_SIZE
    checksum = sum(before) + 8 * ord(" ") + sum(_AFTER_CHECKSUM)
    return b"".join((before, b"%06o\0 " % checksum, _AFTER_CHECKSUM))


def padding(size: int) -> bytes:
    """The zero bytes that fill the last block of a content of `size` bytes."""
    return bytes(-size % BLOCK)


END = bytes(2 * BLOCK)
"""The end-of-archive marker."""


def members(archive: Path | IO[bytes]) -> Iterator[tuple[str, bytes]]:
    """Yield the (name, content) pairs, in order, of an archive written by this module.

    Args:
        archive: a path, or an open buffered file, which is read from its current position and left open.

    Raises:
        EOFError: the archive ends within a member.
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
class TarMember:
    """A file in an archive: its name, the offset of its content in bytes, and its size in bytes."""

    name: str
    offset: int
    size: int


class NoEndError(DamageError):
    """The archive ends after a complete member, without the end-of-archive marker: it is complete, or truncated at that place."""


class Archive:
    """Reads the files of a USTAR, PAX or GNU archive sequentially, with bounded memory.

    The tarfile module treats damage in the middle of an archive, and truncation, as the end of the archive.
    """

    def __init__(self, handle: IO[bytes]) -> None:
        self._handle = handle
        self._position = 0
        self._left = 0  # unread bytes of the current member
        self._padding = 0

    def __iter__(self) -> Iterator[TarMember]:
        """Yield the members; the unread content of a member is skipped.

        Raises:
            DamageError: the archive is damaged or truncated.
            NoEndError: the end-of-archive marker is missing.
        """
        extended: dict[str, str] = {}  # fields of extended headers, which describe the next member
        while (header := self._header()).strip(b"\0"):
            try:
                info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
                if info.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                    extended |= self._extended(info)
                    continue
                size = int(extended.get("size", info.size)) if info.isreg() else 0
            except (tarfile.HeaderError, ValueError) as error:
                raise DamageError(self._position - BLOCK, f"invalid tar header: {library_reason(error)}") from error
            self._left, self._padding = size, -size % BLOCK
            if info.isreg():
                yield TarMember(extended.get("path", info.name), self._position, size)
            extended = {}
            while self.read(BUFFER_BYTES):
                pass
            self._exactly(self._padding)

    def read(self, limit: int) -> bytes:
        """Read up to `limit` bytes of the current member; empty at its end."""
        data = self._exactly(min(limit, self._left))
        self._left -= len(data)
        return data

    def content(self) -> io.BufferedReader:
        """The current member as a file."""
        return io.BufferedReader(_Content(self), BUFFER_BYTES)

    def _extended(self, info: tarfile.TarInfo) -> dict[str, str]:
        """The fields of an extended header, which describes the next member."""
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

    def _header(self) -> bytes:
        data = self._handle.read(BLOCK)
        self._position += len(data)
        if not data:
            raise NoEndError(self._position, "the archive has no end marker")
        if len(data) < BLOCK:
            raise DamageError(self._position, "the archive is truncated")
        return data

    def _exactly(self, size: int) -> bytes:
        data = self._handle.read(size)
        self._position += len(data)
        if len(data) < size:
            raise DamageError(self._position, "the archive is truncated")
        return data


class _Content(io.RawIOBase):
    """The content of the current member of an archive."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._archive.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
