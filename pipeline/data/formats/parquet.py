"""Parquet files: a row a document, its text in one column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data import streams
from pipeline.data.documents import Bad, Document, ReadOptions
from pipeline.data.formats.checks import META_BYTES, UnusableError, fitting, small, text_of
from pipeline.data.sources import Span

_BATCH_ROWS = 64


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad]:
    """The documents of the row groups that begin in the span."""
    source, row = span.source, 0
    with streams.open_raw(source.path) as handle:
        try:
            file = pq.ParquetFile(handle, buffer_size=streams.BUFFER_BYTES)
            if reason := _mismatch(file.schema_arrow, options.text_field):
                if span.start == 0:  # said once a file
                    yield Bad(source.label, "", reason)
                return
            for group, row in _groups(file.metadata, span):
                columns = [options.text_field, *_small_columns(file, group, options.text_field)]
                for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False):
                    for record in _records(batch):
                        try:
                            if record is None:
                                raise UnusableError("is not UTF-8")
                            text = fitting(text_of(record, options.text_field), options)
                            yield Document(source.name, row, text, small(record.items()), source.corpus)
                        except UnusableError as error:
                            yield Bad(source.label, f"row {row}", str(error))
                        row += 1
        except (pa.ArrowException, OSError) as error:
            yield Bad(source.label, f"row {row}" if row else "", f"is damaged or cut short: {error}")


def _mismatch(schema: pa.Schema, field: str) -> str:
    """Why a file of this schema holds no documents; empty if it does."""
    if field not in schema.names:
        return f"has no column {field!r} (data.text_field), only {', '.join(map(repr, schema.names)) or 'none'}"
    kind = schema.field(field).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)):
        return f"has {kind} instead of text in column {field!r} (data.text_field)"
    return ""


def _groups(metadata: Any, span: Span) -> Iterator[tuple[int, int]]:
    """(number, first row) of every row group that begins in the span: where the first page of its first column lies."""
    row = 0
    for group in range(metadata.num_row_groups):
        column = metadata.row_group(group).column(0)
        begin = column.dictionary_page_offset or column.data_page_offset
        if span.start <= begin and (span.end is None or begin < span.end):
            yield group, row
        row += metadata.row_group(group).num_rows


def _small_columns(file: pq.ParquetFile, group: int, text_field: str) -> list[str]:
    """The columns whose values may be small enough to travel along; raw pages and embeddings are not even read."""
    row_group = file.metadata.row_group(group)
    sizes: dict[str, int] = {}
    for number in range(row_group.num_columns):
        column = row_group.column(number)
        name = column.path_in_schema.partition(".")[0]
        sizes[name] = sizes.get(name, 0) + column.total_uncompressed_size
    return [
        field.name
        for field in file.schema_arrow
        if field.name != text_field
        and not pa.types.is_binary(field.type)
        and not pa.types.is_large_binary(field.type)
        and sizes.get(field.name, 0) <= META_BYTES * row_group.num_rows
    ]


def _records(batch: pa.RecordBatch) -> list[dict[str, Any] | None]:
    """The rows of a batch; None for one with bytes that are no UTF-8, which Parquet's writers need not check."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [None]
        return [record for row in range(batch.num_rows) for record in _records(batch.slice(row, 1))]
