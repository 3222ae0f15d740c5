"""Reads documents from files of all supported formats. Bad input is reported, not raised: one broken file must not end a job."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from pipeline.common.errors import UserError
from pipeline.data.read import file_search, suffixes
from pipeline.data.read.documents import DEFAULT_CORPUS, Bad, Document, ReadOptions, Skipped
from pipeline.data.read.input_files import Span
from pipeline.data.read.streams import DamageError


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad | Skipped]:
    """Yield the documents that begin in a span, in file order, including empty ones, a Bad for each unreadable record, and what is skipped.

    If a file is damaged, truncated or unreadable, the documents before the damage are returned, then one Bad.

    Raises:
        UserError: the file has changed since it was listed. Some of its parts would be of one version, and some of another.
    """
    yield from _read(span, options)
    source = span.file
    if change := file_search.change(source.path, source.size, source.version):
        key = "data.input" if source.corpus == DEFAULT_CORPUS else f"data.corpora.{source.corpus}"
        rule = f"{change}, after its bytes {span.start:,} to {span.start + span.size:,} were read"
        raise UserError.of(key, source.path, rule, "end what writes it, or read a copy; then begin again, in an empty data.shards")


def _read(span: Span, options: ReadOptions) -> Iterator[Document | Bad | Skipped]:
    """Yield the content of a span, as read()."""
    file_format = suffixes.file_format(span.file.name)
    if span.file.size == 0 and file_format != "text":
        yield Bad(span.file.label, "", "is an empty file")
        return
    try:
        # Imported on demand: each format imports its own library.
        documents = import_module(f"pipeline.data.read.formats.{file_format}").read(span, options)
        for found in documents:
            yield found
            if not isinstance(found, Skipped):
                yield from documents  # the remainder, without a test per document
                return
        if span.covers_file:
            yield Bad(span.file.label, "", "contains no document")
    except DamageError as error:
        source = span.file
        plain = not suffixes.split_compression(source.name)[1] and error.position < source.size
        read_bytes = error.position if plain else error.stored
        yield Bad(source.label, f"byte {error.position}", f"is damaged or truncated: {error}", source.size - read_bytes)
    except OSError as error:
        yield Bad(span.file.label, "", f"cannot be read: {error.strerror or error}", span.size)
