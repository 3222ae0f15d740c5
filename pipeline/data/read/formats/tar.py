"""WebDataset tars: samples of NAME.txt or NAME.html with an optional NAME.json, NAME.json with the text, and JSON lines members."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Any

import orjson

from pipeline.data import tar
from pipeline.data.read import streams, suffixes
from pipeline.data.read.documents import Bad, Document, ReadOptions, Skipped
from pipeline.data.read.file_search import printable
from pipeline.data.read.formats import html, lines
from pipeline.data.read.formats.checks import UnusableError, check_size, small_fields, text_of
from pipeline.data.read.formats.text import plain
from pipeline.data.read.input_files import Span

_PAGES = ("html", "htm")
_SAMPLE_SUFFIXES = ("txt", *_PAGES, "json")


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad | Skipped]:
    """Yield the documents of the archive, and a Skipped for every member of another type.

    Raises:
        CheckError: without `span.verify`: a .json is not beside its text, as in a tar that is not sorted.
    """
    metadata: dict[str, Any] | None = None
    if span.verify:
        metadata, texts = {}, set()
        with suppress(streams.DamageError), streams.open_bytes(span.file.path, span.section) as handle:
            for sample in _samples(tar.Archive(handle), options):
                if isinstance(sample, _Sample) and sample.is_metadata(options):
                    metadata[sample.key] = sample.members["json"]
                elif isinstance(sample, _Sample) and "json" not in sample.members:
                    texts.add(sample.key)
        metadata = {key: raw for key, raw in metadata.items() if key in texts}
    with streams.open_bytes(span.file.path, span.section) as handle:
        yield from documents(span, tar.Archive(handle), options, metadata)


def documents(span: Span, archive: Any, options: ReadOptions, metadata: dict[str, Any] | None) -> Iterator[Document | Bad | Skipped]:
    """Yield the documents of an archive, as read().

    Args:
        archive: a tar.Archive, or an object with its methods.
        metadata: key -> (member, content) of the .json files that are not beside their texts; None if they are not known.
    """
    source = span.file
    try:
        for sample in _samples(archive, options):
            if not isinstance(sample, _Sample):
                yield from _lines(span, sample, archive.content(), options) if isinstance(sample, tar.TarMember) else [sample]
            elif metadata and sample.key in metadata:
                if not sample.is_metadata(options):
                    sample.members.setdefault("json", metadata[sample.key])
                    yield from sample.document(span, options)
            elif metadata is None and sample.is_metadata(options):
                raise streams.CheckError(sample.members["json"][0].offset, "a .json is not beside its text")
            elif "." in (name := sample.key.rpartition("/")[2]) and sample.is_metadata(options):  # of a part of a sample, as in 1.meta.json
                suffix = suffixes.shown(f".{name.partition('.')[2]}.json".lower())
                yield Skipped(f"archive member {suffixes.UNREAD}{suffix}", sample.members["json"][0].size)
            else:
                yield from sample.document(span, options)
    except tar.NoEndError as error:
        yield Bad(source.label, f"byte {error.position}", f"is perhaps truncated: {error}")


def _samples(archive: Any, options: ReadOptions) -> Iterator[_Sample | tar.TarMember | Skipped]:
    """Yield the samples, the members with JSON lines, whose content is then to be read, and a Skipped for other members."""
    sample = _Sample("")
    try:
        for member in archive:
            key, suffix = split(member.name)
            if key != sample.key:
                yield sample
                sample = _Sample(key)
            if suffix in _SAMPLE_SUFFIXES:
                yield from sample.add(suffix, member, archive.read(options.document_bytes + 1))
            elif suffix == "jsonl":
                yield member
            else:
                yield Skipped(f"archive member {suffixes.UNREAD}{suffixes.of_name(member.name)}", member.size)
    except streams.DamageError:
        yield sample  # the sample before the damage is complete
        raise
    yield sample


def split(name: str) -> tuple[str, str]:
    """Return (key, suffix) of a member: the suffix begins at the last dot, since names have dots, too. Hidden files have none."""
    key, _, suffix = name.rpartition(".")
    return (key, suffix.lower()) if "/" not in suffix and not name.rpartition("/")[2].startswith(".") else (name, "")


class _Sample:
    """The members of one key that have been read so far."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.members: dict[str, tuple[tar.TarMember, bytes]] = {}

    def add(self, suffix: str, member: tar.TarMember, raw: bytes) -> Iterator[Skipped]:
        """Add a member; as in tar, it replaces an earlier one of the same name."""
        if suffix in self.members:
            yield Skipped("archive member that a later one of the same name replaces", self.members[suffix][0].size)
        self.members[suffix] = (member, raw)

    def is_metadata(self, options: ReadOptions) -> bool:
        """Whether it is only a .json without a text in it."""
        if list(self.members) != ["json"]:
            return False
        with suppress(UnusableError):
            return options.text_field not in self._fields(options)
        return False

    def document(self, span: Span, options: ReadOptions) -> Iterator[Document | Bad | Skipped]:
        """Yield the document of the sample, if it has one, or a Bad; and a Skipped for a page beside a text."""
        suffix = next((suffix for suffix in _SAMPLE_SUFFIXES if suffix in self.members), None)
        if suffix is None:
            return
        source, (member, raw) = span.file, self.members[suffix]
        for other in _PAGES:
            if other != suffix and other in self.members and suffix != "json":
                yield Skipped(f"archive member {suffixes.UNREAD}.{other} beside .{suffix}", self.members[other][0].size)
        try:
            fields = self._fields(options)
            if suffix == "txt":
                check_size(len(raw), options)
                text = plain(raw)
            elif suffix == "json":
                text = text_of(fields, options.text_field)
            else:
                text, more = html.page(raw, None, options)
                fields |= more
            yield Document(source.name, member.offset, text, small_fields(fields.items()), source.corpus)
        except UnusableError as error:
            yield Bad(source.label, f"member {printable(member.name)}", str(error))

    def _fields(self, options: ReadOptions) -> dict[str, Any]:
        """The record of the .json member; empty without one.

        Raises:
            UnusableError: the record is invalid.
        """
        _, raw = self.members.get("json", (None, b"{}"))
        check_size(len(raw), options, "has a .json that ")
        try:
            record = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise UnusableError(f"has a .json that is not JSON: {error}") from error
        if not isinstance(record, dict):
            raise UnusableError(f"has a .json that contains a {type(record).__name__}, not an object")
        if isinstance(record.get("meta"), dict) and record.keys() >= {"id", "source"}:  # a text shard of this pipeline
            record |= record.pop("meta")
        return record


def _lines(span: Span, member: tar.TarMember, handle: IO[bytes], options: ReadOptions) -> Iterator[Document | Bad]:
    """Yield the documents of a JSON lines member."""
    parsed = lines.records(handle, 0, None, options)
    yield from lines.documents(span.file, parsed, lambda _, number: f"member {printable(member.name)}, line {number}", member.offset)
