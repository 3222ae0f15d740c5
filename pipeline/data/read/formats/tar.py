"""WebDataset tars: samples of NAME.txt or NAME.html with an optional NAME.json, NAME.json with the text, and JSON lines members."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

import orjson

from pipeline.data import tar
from pipeline.data.read import streams, suffixes
from pipeline.data.read.documents import Bad, Document, ReadOptions, Skipped
from pipeline.data.read.file_search import printable
from pipeline.data.read.formats import html, lines
from pipeline.data.read.formats.checks import UnusableError, small_fields, text_of, too_large
from pipeline.data.read.formats.text import plain
from pipeline.data.read.input_files import Span

_PAGES = ("html", "htm")
_SAMPLE_SUFFIXES = ("txt", *_PAGES, "json")


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad | Skipped]:
    """Yield the documents of the archive, and a Skipped for every member of another type."""
    source = span.file
    with streams.open_bytes(source.path, span.section) as handle:
        archive = tar.Archive(handle)
        sample = _Sample("")
        try:
            for member in archive:
                key, suffix = _split(member.name)
                if key != sample.key:
                    yield from sample.document(span, options)
                    sample = _Sample(key)
                if suffix in _SAMPLE_SUFFIXES:
                    yield from sample.add(suffix, member, archive.read(options.document_bytes + 1))
                elif suffix == "jsonl":
                    yield from _lines(span, member, archive.content(), options)
                else:
                    yield Skipped(f"tar member {suffixes.UNREAD}{suffixes.shown(_dotted(suffix))}", member.size)
        except tar.NoEndError as error:
            yield from sample.document(span, options)
            yield Bad(source.label, f"byte {error.position}", f"is perhaps truncated: {error}")
            return
        except streams.DamageError:
            yield from sample.document(span, options)  # the sample before the damage is complete
            raise
        yield from sample.document(span, options)


def _split(name: str) -> tuple[str, str]:
    """Return (key, suffix) of a member as WebDataset defines them: the suffix begins at the first dot of the base name."""
    folder, slash, name = name.rpartition("/")
    stem, _, suffix = name.partition(".")
    return folder + slash + stem, suffix.lower()


def _dotted(suffix: str) -> str:
    return f".{suffix}" if suffix else ""


class _Sample:
    """The members of one key that have been read so far."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._members: dict[str, tuple[tar.Member, bytes]] = {}

    def add(self, suffix: str, member: tar.Member, raw: bytes) -> Iterator[Skipped]:
        """Add a member; as in tar, it replaces an earlier one of the same name."""
        if suffix in self._members:
            yield Skipped("tar member that a later one of the same name replaces", self._members[suffix][0].size)
        self._members[suffix] = (member, raw)

    def document(self, span: Span, options: ReadOptions) -> Iterator[Document | Bad | Skipped]:
        """Yield the document of the sample, if it has one, or a Bad; and a Skipped for a page beside a text."""
        suffix = next((suffix for suffix in _SAMPLE_SUFFIXES if suffix in self._members), None)
        if suffix is None:
            return
        source, (member, raw) = span.file, self._members[suffix]
        for other in _PAGES:
            if other != suffix and other in self._members and suffix != "json":
                yield Skipped(f"tar member {suffixes.UNREAD}.{other} beside .{suffix}", self._members[other][0].size)
        try:
            fields = self._fields(options)
            if suffix == "txt":
                text = plain(raw, options)
            elif suffix == "json":
                text = text_of(fields, options.text_field)
            else:
                text, title = html.page(raw, None, options)
                fields |= {"title": title} if title else {}
            yield Document(source.name, member.offset, text, small_fields(fields.items()), source.corpus)
        except UnusableError as error:
            yield Bad(source.label, f"member {printable(member.name)}", str(error))

    def _fields(self, options: ReadOptions) -> dict[str, Any]:
        """The record of the .json member; empty without one.

        Raises:
            UnusableError: the record is invalid.
        """
        _, raw = self._members.get("json", (None, b"{}"))
        if len(raw) > options.document_bytes:
            raise UnusableError(f"has a .json that {too_large(options)}")
        try:
            record = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise UnusableError(f"has a .json that is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise UnusableError(f"has a .json that contains a {type(record).__name__}, not an object")
        if isinstance(record.get("meta"), dict) and record.keys() >= {"id", "source"}:  # a text shard of this pipeline
            record |= record.pop("meta")
        return record


def _lines(span: Span, member: tar.Member, handle: IO[bytes], options: ReadOptions) -> Iterator[Document | Bad]:
    """Yield the documents of a JSON lines member."""
    source = span.file
    for offset, number, found in lines.records(handle, 0, None, options):
        if isinstance(found, str):
            yield Bad(source.label, f"member {printable(member.name)}, line {number}", found)
        else:
            text, meta = found
            yield Document(source.name, member.offset + offset, text, meta, source.corpus)
