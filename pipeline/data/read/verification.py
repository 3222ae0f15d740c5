"""What of a compressed file its checks confirm, and where reading goes on behind damage."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import IO

from pipeline.data.read.streams import BUFFER_BYTES, MAGIC, CheckError, CutError, Decompressed, Section, open_raw


def sections(path: str, compression: str, begins: bytes | None) -> list[Section]:
    """Decompress a file and return its sections, each but perhaps the last with the damage behind it.

    Of a damaged member nothing is in a section, nor of one that the end of the file cuts: flipped bits can make it look so. Of bzip2, which
    has a check for every block, the blocks before the damage are.

    Args:
        begins: with what the data of a member begins where reading may go on behind damage; None ends at the first damage.
    """
    found = [Section()]
    with open_raw(path) as handle:
        size = handle.seek(0, io.SEEK_END)
        while True:
            section = found[-1]
            handle.seek(section.stored)
            stream = Decompressed(handle, compression, section)
            try:
                while stream.read(BUFFER_BYTES):
                    pass
                return found
            except CheckError as error:
                following = None if begins is None else _next_member(handle, compression, stream.member[0] + 1, begins)
                stored, section.end = stream.verified
                lost = following - stream.member[0] if following else size - stored * (not isinstance(error, CutError))
                section.damage, section.damaged = type(error)(section.end, str(error), lost), Section(*stream.member)
                if following is None:
                    return found
                found.append(Section(following, section.end))


def _next_member(handle: IO[bytes], compression: str, start: int, begins: bytes) -> int | None:
    """Where the first intact member begins at or behind a position of the file."""
    magic, size = MAGIC[compression], BUFFER_BYTES
    while size == BUFFER_BYTES:
        handle.seek(start)
        chunk = handle.read(BUFFER_BYTES)
        place, size = chunk.find(magic), len(chunk)
        if place < 0:
            start += size - len(magic) + 1
            continue
        start, size = start + place, BUFFER_BYTES
        handle.seek(start)
        stream = Decompressed(handle, compression, Section(start))
        with suppress(CheckError):
            is_begun = (stream.read(BUFFER_BYTES) or b"").startswith(begins)
            while is_begun and not stream.complete and stream.read(BUFFER_BYTES):
                pass
            if is_begun and stream.complete:
                return start
        start += 1
    return None
