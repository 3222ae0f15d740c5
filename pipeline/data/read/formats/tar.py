"""WebDataset tars: samples of NAME.txt or NAME.html with NAME.json beside it, NAME.json alone, and members of JSON lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO, Any

import orjson

from pipeline.data import tar
from pipeline.data.read import streams
from pipeline.data.read.documents import Bad, Document, ReadOptions
from pipeline.data.read.formats import html, lines
from pipeline.data.read.formats.checks import UnusableError, small, text_of, too_large
from pipeline.data.read.formats.text import plain
from pipeline.data.read.places import printable
from pipeline.data.read.sources import Span

_PIECES = ("txt", "html", "htm", "json")


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad]:
    """The documents of the archive; members that are no text are passed over."""
    source = span.source
    with streams.open_bytes(source.path) as handle:
        archive = tar.Archive(handle)
        sample = _Sample("")
        try:
            for member in archive:
                key, ending = _split(member.name)
                if key != sample.key:
                    yield from sample.document(span, options)
                    sample = _Sample(key)
                if ending in _PIECES:
                    sample.add(ending, member, archive.read(options.document_bytes + 1))
                elif ending == "jsonl":
                    yield from _lines(span, member, archive.content(), options)
        except streams.DamageError:
            yield from sample.document(span, options)  # its text is whole
            raise
        yield from sample.document(span, options)


def _split(name: str) -> tuple[str, str]:
    """(key, ending) of a member, as WebDataset has it: the ending begins at the first dot of the name within its folder."""
    folder, slash, name = name.rpartition("/")
    stem, _, ending = name.partition(".")
    return folder + slash + stem, ending.lower()


class _Sample:
    """The members of one key that make a document, as far as they have come by."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._pieces: dict[str, tuple[tar.Member, bytes]] = {}

    def add(self, ending: str, member: tar.Member, raw: bytes) -> None:
        self._pieces[ending] = (member, raw)

    def document(self, span: Span, options: ReadOptions) -> Iterator[Document | Bad]:
        """What has become of the sample: one document at most."""
        ending = next((ending for ending in _PIECES if ending in self._pieces), None)
        if ending is None:
            return
        source, (member, raw) = span.source, self._pieces[ending]
        try:
            fields = self._fields(options)
            if ending == "txt":
                text = plain(raw, options)
            elif ending == "json":
                text = text_of(fields, options.text_field)
            else:
                text, title = html.page(raw, None, options)
                fields |= {"title": title} if title else {}
            yield Document(source.name, member.offset, text, small(fields.items()), source.corpus)
        except UnusableError as error:
            yield Bad(source.label, f"member {printable(member.name)}", str(error))

    def _fields(self, options: ReadOptions) -> dict[str, Any]:
        """The record beside the text.

        Raises:
            UnusableError: it is none.
        """
        _, raw = self._pieces.get("json", (None, b"{}"))
        if len(raw) > options.document_bytes:
            raise UnusableError(f"has a .json that {too_large(options)}")
        try:
            record = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise UnusableError(f"has a .json that is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise UnusableError(f"has a .json that holds a {type(record).__name__}, not an object")
        if isinstance(record.get("meta"), dict) and record.keys() >= {"id", "source"}:  # a shard that was written here
            record |= record.pop("meta")
        return record


def _lines(span: Span, member: tar.Member, handle: IO[bytes], options: ReadOptions) -> Iterator[Document | Bad]:
    """The documents of a member of JSON lines."""
    source = span.source
    for offset, number, found in lines.records(handle, 0, None, options):
        if isinstance(found, str):
            yield Bad(source.label, f"member {printable(member.name)}, line {number}", found)
        else:
            text, meta = found
            yield Document(source.name, member.offset + offset, text, meta, source.corpus)
