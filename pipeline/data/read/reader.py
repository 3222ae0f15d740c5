"""Reads documents from files of all supported formats. Bad input is reported, not raised: one broken file must not end a job.

Of a damaged compressed file, what its checks confirm is read, and reading goes on behind the damage where it can.
"""

from __future__ import annotations

import io
import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import IO

from pipeline.common.errors import UserError
from pipeline.common.remote import is_remote
from pipeline.config.data import DataConfig
from pipeline.data.read import file_search, input_files, suffixes
from pipeline.data.read.documents import DEFAULT_CORPUS, Bad, Document, ReadOptions, Skipped, Unchecked, key_of, utf8_length
from pipeline.data.read.input_files import Span
from pipeline.data.read.streams import BUFFER_BYTES, MAGIC, CheckError, CutError, DamageError, Decompressed, Section, open_raw

log = logging.getLogger("pipeline")

_NAMED = 5
"""Unreadable records that the log of `texts` names."""
_ONE_DOCUMENT = ("text", "html")
"""Formats of which damage anywhere loses the whole file."""
_GOES_ON = {"lines": b"", "json_values": b"", "warc": b"WARC/"}
"""Formats that are read on behind damage -> what the data of a compressed member begins with where they are."""


def sections(path: str, compression: str, begins: bytes | None) -> list[Section]:
    """Decompress a file and return its sections, each but perhaps the last with the damage behind it.

    Of a damaged member nothing is in a section, nor of one that the end of the file cuts: flipped bits can make it look so. Of bzip2, which
    has a check for every block, the blocks before the damage are.

    Args:
        begins: with what the data of a member begins where reading may go on behind damage; None ends at the first damage.
    """
    result = [Section()]
    with open_raw(path) as handle:
        size = handle.seek(0, io.SEEK_END)
        while True:
            section = result[-1]
            handle.seek(section.stored)
            stream = Decompressed(handle, compression, section)
            try:
                while stream.read(BUFFER_BYTES):
                    pass
                return result
            except CheckError as error:
                following = None if begins is None else _next_member(handle, compression, stream.member[0] + 1, begins)
                stored, section.end = stream.verified
                lost = following - stream.member[0] if following else size - (0 if isinstance(error, CutError) else stored)
                section.damage, section.damaged = type(error)(section.end, str(error), lost), Section(*stream.member)
                if following is None:
                    return result
                result.append(Section(following, section.end))


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


def read(span: Span, options: ReadOptions, *, verify: bool = True) -> Iterator[Document | Bad | Skipped | Unchecked]:
    """Yield the documents that begin in a span, in file order, including empty ones, a Bad for each unreadable record, and what is skipped.

    If a file is damaged, truncated or unreadable, the documents before the damage are returned, then one Bad. Of compressed data only
    those are that pass a check.

    Raises:
        CheckError: without `verify`: compressed data are damaged. Documents that were returned may not be in the original.
        UserError: the file has changed since it was listed. Some of its parts would be of one version, and some of another.
    """
    source, failure = span.file, None
    try:
        yield from _read(span, options, verify)
    except CheckError as error:
        if not verify:
            raise
        failure = error
    key = key_of(source.corpus)
    if change := file_search.change(source.path, source.size, source.version):
        rule = f"{change}, after its bytes {span.start:,} to {span.start + span.size:,} were read"
        raise UserError.of(key, source.path, rule, "end what writes it, or read a copy; then begin again, in an empty data.shards")
    if failure:
        rule = f"is read with other bytes than before, and {failure.problem} after {failure.position:,} bytes of data: {failure}"
        raise UserError.of(key, source.path, rule, "read a copy in another place")


def _read(span: Span, options: ReadOptions, verify: bool) -> Iterator[Document | Bad | Skipped | Unchecked]:
    """Yield the content of a span, as read()."""
    source, file_format, compression = span.file, suffixes.file_format(span.file.name), suffixes.split_compression(span.file.name)[1]
    if source.size == 0 and file_format != "text" and not is_remote(source.path):  # some servers do not tell a size
        yield Bad(source.label, "", "is an empty file")
        return
    # Imported on demand: each format imports its own library.
    content, is_empty = import_module(f"pipeline.data.read.formats.{file_format}").read, span.start == 0 and span.end is None
    try:
        verified = sections(source.path, compression, _GOES_ON.get(file_format)) if compression and verify else [Section()]
        for section in verified:
            try:
                documents = content(replace(span, section=section, verify=verify), options)
                for item in documents:
                    yield item
                    if not isinstance(item, Skipped):
                        is_empty = False
                        yield from documents  # the remainder, without a test per document
            except DamageError as error:
                if isinstance(error, CheckError) and error is not section.damage:
                    raise
                is_empty, lost, reason = False, error.lost, f"{error.problem}: {error}"
                if lost is None:
                    lost = source.size - (error.position if not compression and error.position < source.size else 0)
                if error is section.damage:
                    reason += _taken_back(content(replace(span, section=section.damaged), options), error.position)
                yield Bad(source.label, f"byte {error.position}", reason, max(lost, source.size) if file_format in _ONE_DOCUMENT else lost)
        if is_empty:
            yield Bad(source.label, "", "contains no document")
        if any(section.unchecked for section in verified):
            yield Unchecked()
    except CheckError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and not is_remote(source.path):  # every protocol raises its own exception types
            raise
        yield Bad(source.label, "", f"cannot be read: {getattr(error, 'strerror', '') or error or type(error).__name__}", span.size)


def _taken_back(documents: Iterator[Document | Bad | Skipped], position: int) -> str:
    """What can be read of a damaged member although it does not pass its check: its documents behind a position, in words."""
    sizes = []
    with suppress(DamageError):
        for item in documents:
            sizes += [utf8_length(item.text)] if isinstance(item, Document) and item.offset >= position else []
    return f"; {len(sizes):,} documents, {sum(sizes):,} bytes, that can be read do not pass its check, and are left out" if sizes else ""


def texts(inputs: Sequence[str], key: str, data: DataConfig) -> Iterator[str]:
    """Yield the texts of other documents than those of training; unreadable records are skipped with a warning.

    Args:
        inputs: files, folders, globs or URLs.
        key: configuration key or option that names them.

    Raises:
        UserError: an input does not exist.
    """
    try:
        known = [*data.suffixes, *suffixes.SEARCHED] if data.suffixes else []  # also text shards, whatever those of training are
        listing = input_files.find({DEFAULT_CORPUS: list(inputs)}, known, data.exclude)
    except UserError as error:
        raise UserError([replace(violation, key=key) for violation in error.violations]) from error
    documents = (document for source in listing.files for document in read(Span(source), ReadOptions.of(data)))
    skipped = 0
    for document in itertools.chain(listing.bad, documents):
        if isinstance(document, Bad):
            skipped += 1
            if skipped <= _NAMED:
                log.warning("%s: skipped %s %s: %s", key, document.source, document.position, document.reason)
        elif isinstance(document, Document) and document.text:
            yield document.text
    if skipped > _NAMED:
        log.warning("%s: skipped %d records", key, skipped)
