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
    encoded = name.encode("ascii")
    assert len(encoded) <= 100
    assert len(data) <= MAX_MEMBER_BYTES
    before = encoded.ljust(100, b"\0") + _BEFORE_SIZE + b"%011o\0" % len(data) + _AFTER_SIZE
    checksum = sum(before) + 8 * ord(" ") + sum(_AFTER_CHECKSUM)
    return b"".join((before, b"%06o\0 " % checksum, _AFTER_CHECKSUM, data, bytes(-len(data) % BLOCK)))


END = bytes(2 * BLOCK)
"""What closes an archive."""


def members(path: Path) -> Iterator[tuple[str, bytes]]:
    """The (name, content) pairs of an archive that was written here, in order."""
    with open(path, "rb", buffering=1 << 20) as handle:
        while (header := _read(handle, BLOCK, path)).strip(b"\0"):
            size = int(header[124:135], 8)
            content = _read(handle, size + -size % BLOCK, path)
            yield header[:100].rstrip(b"\0").decode("ascii"), content[:size]


def _read(handle: IO[bytes], size: int, path: Path) -> bytes:
    data = handle.read(size)
    if len(data) < size:
        raise EOFError(f"{path} ends within a member")
    return data
