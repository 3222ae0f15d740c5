"""CSV and TSV files with a header and the quotation marks of RFC 4180: one document per row, with the text in one column."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator
from typing import IO

from pipeline.data.read import streams, suffixes
from pipeline.data.read.documents import Bad, Document, ReadOptions
from pipeline.data.read.formats import lines
from pipeline.data.read.formats.checks import field_names
from pipeline.data.read.input_files import Span


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad]:
    """Yield the documents of the rows, which are counted from 0, the header."""
    source = span.file
    delimiter = "\t" if suffixes.split_compression(source.name)[0].lower().endswith(".tsv") else ","
    with streams.open_bytes(source.path, span.section) as handle:
        yield from lines.documents(source, _records(handle, delimiter, options), lambda _, number: f"row {number}")


def _records(handle: IO[bytes], delimiter: str, options: ReadOptions) -> Iterator[tuple[int, int, lines.Record | str]]:
    csv.field_size_limit(options.document_bytes)
    decoded = codecs.iterdecode(_lines(handle, options.document_bytes), "utf-8-sig", "surrogateescape")
    rows, header, number = csv.reader(decoded, delimiter=delimiter, strict=True), [""], -1
    while True:
        number += 1
        try:
            row = next(rows, None)
        except csv.Error as error:
            yield number, number, f"is not CSV: {error}"
            continue
        if row is None:
            return
        if not number:
            header = row
        if options.text_field not in header:
            yield number, number, f"has no column {options.text_field!r} (data.text_field), only {field_names(header)}"
            return
        if row and number:
            is_whole, differs = len(row) == len(header), f"has {len(row)} fields, and the header has {len(header)}"
            yield number, number, lines.usable(dict(zip(header, row, strict=True)), options) if is_whole else differs


def _lines(handle: IO[bytes], limit: int) -> Iterator[bytes]:
    """Yield the lines; a longer one as a field that the parser refuses."""
    while line := handle.readline(limit + 1):
        if len(line) > limit and not line.endswith(b"\n"):
            lines.skip_line(handle)
        yield line if len(line) <= limit else b"x" * (limit + 1) + b"\n"
