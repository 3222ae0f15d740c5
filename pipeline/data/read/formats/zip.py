"""Zip archives, with members as in a tar. They are verified and sorted before they are read."""

from __future__ import annotations

import io
import lzma
import zipfile
import zlib
from collections.abc import Iterator

from pipeline.data import tar
from pipeline.data.read import streams
from pipeline.data.read.documents import Bad, Document, ReadOptions, Skipped, library_reason
from pipeline.data.read.file_search import printable
from pipeline.data.read.formats.tar import documents, split
from pipeline.data.read.input_files import Span

#: RuntimeError: a password is required.
_DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, OSError, NotImplementedError, RuntimeError, ValueError)


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad | Skipped]:
    """Yield the documents of the archive, a Bad for every damaged member, and a Skipped for every member of another type."""
    source, intact = span.file, []
    with streams.open_raw(source.path) as handle:
        try:
            archive = zipfile.ZipFile(handle)
        except _DAMAGE as error:
            yield Bad(source.label, "", f"is damaged or truncated: {library_reason(error)}", source.size)
            return
        for info in sorted(archive.infolist(), key=lambda info: split(info.filename)):
            try:
                with archive.open(info) as member:
                    while member.read(streams.BUFFER_BYTES):
                        pass
                intact += [] if info.is_dir() else [info]
            except _DAMAGE as error:
                yield Bad(
                    source.label, f"member {printable(info.filename)}", f"cannot be read: {library_reason(error)}", info.compress_size
                )
        yield from documents(span, _Zip(archive, intact), options, {})


class _Zip:
    """The members as those of pipeline.data.tar.Archive; offsets are those of their concatenation."""

    def __init__(self, archive: zipfile.ZipFile, members: list[zipfile.ZipInfo]) -> None:
        self._archive, self._members = archive, members

    def __iter__(self) -> Iterator[tar.TarMember]:
        offset = 0
        for info in self._members:
            with self._archive.open(info) as self._member:
                yield tar.TarMember(info.filename, offset, info.file_size)
            offset += info.file_size + 1

    def read(self, limit: int) -> bytes:
        return self._member.read(limit)

    def content(self) -> io.BufferedReader:
        return io.BufferedReader(self._member)  # type: ignore[arg-type]
