"""Documents out of files of any form. Bad input is told, never raised: one broken file must not end a job of a thousand ranks."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from pipeline.data.read import suffixes
from pipeline.data.read.documents import Bad, Document, ReadOptions
from pipeline.data.read.sources import Span
from pipeline.data.read.streams import DamageError


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad]:
    """What begins in a span, in the file's order: documents, empty ones included, and what could not become one.

    Of a file that is damaged, cut short or cannot be read (any more), whatever comes before the damage is given, then one Bad.
    """
    form = suffixes.form(span.source.name)
    if span.source.size == 0 and form != "text":
        yield Bad(span.source.label, "", "is an empty file")
        return
    try:
        # Loaded on demand: each brings its library.
        found = import_module(f"pipeline.data.read.formats.{form}").read(span, options)
        first = next(found, None)
        if first is not None:
            yield first
            yield from found
        elif span.whole:
            yield Bad(span.source.label, "", "holds no document")
    except DamageError as error:
        yield Bad(span.source.label, f"byte {error.position}", f"is damaged or cut short: {error}")
    except OSError as error:
        yield Bad(span.source.label, "", f"cannot be read: {error.strerror or error}")
