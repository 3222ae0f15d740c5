"""Plain USTAR archives with nothing in their headers that depends on who wrote them or when.

tarfile and webdataset's writer spend most of their time on headers, and PAX headers would double the size of short documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

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
