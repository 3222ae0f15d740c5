"""Reads documents from files of all supported formats. Bad input is reported, not raised: one broken file must not end a job."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from pipeline.data.read import suffixes
from pipeline.data.read.documents import Bad, Document, ReadOptions
from pipeline.data.read.input_files import Span
from pipeline.data.read.streams import DamageError


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad]:
    """Yield the documents that begin in a span, in file order, including empty ones, and a Bad for each unreadable record.

    If a file is damaged, truncated or unreadable, the documents before the damage are returned, then one Bad.
    """
    file_format = suffixes.file_format(span.file.name)
    if span.file.size == 0 and file_format != "text":
        yield Bad(span.file.label, "", "is an empty file")
        return
    try:
        # Imported on demand: each format imports its own library.
        documents = import_module(f"pipeline.data.read.formats.{file_format}").read(span, options)
        first = next(documents, None)
        if first is not None:
            yield first
            yield from documents
        elif span.covers_file:
            yield Bad(span.file.label, "", "contains no document")
    except DamageError as error:
        source = span.file
        plain = not suffixes.split_compression(source.name)[1] and error.position < source.size
        read_bytes = error.position if plain else error.stored
        yield Bad(source.label, f"byte {error.position}", f"is damaged or truncated: {error}", source.size - read_bytes)
    except OSError as error:
        yield Bad(span.file.label, "", f"cannot be read: {error.strerror or error}", span.size)
