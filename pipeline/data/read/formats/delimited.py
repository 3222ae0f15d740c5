"""CSV and TSV files with a header and the quotation marks of RFC 4180: one document per row, with the text in one column."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator
from typing import IO

from pipeline.data.read import streams, suffixes
from pipeline.data.read.documents import Bad, Document, ReadOptions
from pipeline.data.read.formats.checks import document_of, no_column
from pipeline.data.read.formats.lines import skip_line
from pipeline.data.read.input_files import Span


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad]:
    """Yield the documents of the rows, which are counted from 0, the header."""
    source, number, header = span.file, -1, [""]
    csv.field_size_limit(options.document_bytes)
    with streams.open_bytes(source.path, span.section) as handle:
        decoded = codecs.iterdecode(_lines(handle, options.document_bytes), "utf-8-sig", "surrogateescape")
        is_tsv = suffixes.split_compression(source.name)[0].lower().endswith(".tsv")
        rows = csv.reader(decoded, delimiter="\t" if is_tsv else ",", strict=True)
        while True:
            number, line, place = number + 1, rows.line_num, handle.tell()
            try:
                row = next(rows, None)
            except csv.Error as error:  # with a quotation mark that is not closed, the following rows are lost, too
                lost = (handle.tell() - place) // source.expansion if rows.line_num > line + 1 else 0
                yield Bad(source.label, f"row {number}", f"is not CSV: {error}", lost)
                continue
            header = header if number else row or header
            if row is None:
                return
            if options.text_field not in header:
                yield Bad(source.label, "", no_column(options.text_field, header), source.size)
                return
            if number and len(row) == len(header):
                yield document_of(dict(zip(header, row, strict=True)), source, number, "row", options)
            elif number and row:
                yield Bad(source.label, f"row {number}", f"has {len(row)} fields, and the header has {len(header)}")


def _lines(handle: IO[bytes], limit: int) -> Iterator[bytes]:
    """Yield the lines; a longer one as a field that the parser refuses."""
    while line := handle.readline(limit + 1):
        if len(line) > limit and not line.endswith(b"\n"):
            skip_line(handle)
        yield line if len(line) <= limit else b"x" * (limit + 1) + b"\n"
