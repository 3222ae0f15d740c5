"""Arrow IPC files and streams, as of Hugging Face datasets: one document per row, with the text in one column."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from pipeline.data.read import streams
from pipeline.data.read.documents import Bad, Document, ReadOptions, library_reason
from pipeline.data.read.formats.parquet import DAMAGE, columns_of, documents, mismatch
from pipeline.data.read.input_files import Span


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad]:
    """Yield the documents of the batches up to damage. Arrow has no checksums; damage is found if it breaks the structure."""
    source = span.file
    with streams.open_raw(source.path) as handle:
        try:
            is_file = handle.peek(6).startswith(b"ARROW1")  # type: ignore[attr-defined]
            reader = pa.ipc.open_file(handle) if is_file else pa.ipc.open_stream(handle)
            if reason := mismatch(reader.schema, options.text_field):
                yield Bad(source.label, "", reason, source.size)
                return
            columns = columns_of(reader.schema, options.text_field)
        except DAMAGE as error:
            yield Bad(source.label, "", f"is damaged or truncated: {library_reason(error)}", source.size)
            return
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        yield from documents(source, (_selected(batch, columns) for batch in batches), 0, source.size, options)


def _selected(batch: pa.RecordBatch, columns: list[str]) -> pa.RecordBatch:
    selected = batch.select(columns)
    selected.validate(full=True)  # damaged offsets would be followed anywhere
    return selected
