"""Parquet files: one document per row, with the text in one column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.read import streams
from pipeline.data.read.documents import Bad, Document, ReadOptions, library_reason
from pipeline.data.read.formats.checks import document_of, no_column
from pipeline.data.read.input_files import InputFile, Span

_BATCH_ROWS = 64


DAMAGE = (pa.ArrowException, OSError, UnicodeDecodeError)  # UnicodeDecodeError: column names in a damaged schema


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad]:
    """Yield the documents of the row groups that begin in the span. Of a damaged row group, the rows before the damage are read."""
    source = span.file
    with streams.open_raw(source.path) as handle:
        try:
            file = pq.ParquetFile(handle, buffer_size=streams.BUFFER_BYTES, page_checksum_verification=True)
            if reason := mismatch(file.schema_arrow, options.text_field):
                if span.start == 0:  # reported once per file
                    yield Bad(source.label, "", reason, source.size)
                return
            columns, groups = columns_of(file.schema_arrow, options.text_field), list(_groups(file.metadata, span))
        except DAMAGE as error:
            yield Bad(source.label, "", f"is damaged or truncated: {library_reason(error)}", span.size)
            return
        for group, row, stored_bytes in groups:
            batches = file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=columns, use_threads=False)
            yield from documents(source, batches, row, stored_bytes, options)


def documents(
    source: InputFile, batches: Iterable[pa.RecordBatch], row: int, stored_bytes: int, options: ReadOptions
) -> Iterator[Document | Bad]:
    """Yield the documents of batches of so many stored bytes, from row `row` on, up to damage."""
    try:
        for batch in batches:
            for record in records(batch):
                if record is None:
                    yield Bad(source.label, f"row {row}", "contains invalid UTF-8, or a date out of range")
                else:
                    yield document_of(record, source, row, "row", options, check=False)
                row += 1
    except DAMAGE as error:
        yield Bad(source.label, f"row {row}", f"is damaged or truncated: {library_reason(error)}", stored_bytes)


def rows(span: Span) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of the row groups that begin in the span, with all columns; None for a row that Python cannot represent.

    Raises:
        DAMAGE: the file is damaged.
    """
    with streams.open_raw(span.file.path) as handle:
        file = pq.ParquetFile(handle, buffer_size=streams.BUFFER_BYTES, page_checksum_verification=True)
        for group, *_ in _groups(file.metadata, span):
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], use_threads=False):
                yield from records(batch)


def mismatch(schema: pa.Schema, field: str) -> str:
    """The reason why a file with this schema has no documents; empty if it has."""
    if field not in schema.names:
        return no_column(field, schema.names)
    kind = schema.field(field).type
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(value) or pa.types.is_large_string(value) or pa.types.is_string_view(value)):
        return f"has {str(kind).partition('<')[0]} instead of text in column {field!r} (data.text_field)"
    return ""


def _groups(metadata: pq.FileMetaData, span: Span) -> Iterator[tuple[int, int, int]]:
    """Yield (number, first row, stored bytes) of every row group that begins in the span. Its bytes are estimated from its share.

    The column metadata contains the exact offset, but reading damaged column metadata crashes the process.
    """
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    total = max(1, sum(group.total_byte_size for group in groups))
    row = before = 0
    for number, group in enumerate(groups):
        begin = span.file.size * before // total
        if span.start <= begin and (span.end is None or begin < span.end):
            yield number, row, span.file.size * group.total_byte_size // total
        row += group.num_rows
        before += group.total_byte_size


def columns_of(schema: pa.Schema, text_field: str) -> list[str]:
    """The columns to read: all except bulk data, such as raw pages and embeddings."""
    return [field.name for field in schema if field.name == text_field or not _is_bulk(field.type)]


def _is_bulk(kind: pa.DataType) -> bool:
    nested = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind) else None
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or (nested is not None and pa.types.is_floating(nested))


def records(batch: pa.RecordBatch) -> list[dict[str, Any] | None]:
    """The rows of a batch; None for a row with values that Python cannot represent, which Parquet writers do not check."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError):
        if batch.num_rows == 1:
            return [None]
        return [record for row in range(batch.num_rows) for record in records(batch.slice(row, 1))]
