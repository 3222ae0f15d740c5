"""Web archives (ISO 28500): the pages of HTTP responses, and texts that a crawler has converted (WET). By fastwarc."""

from __future__ import annotations

import io
from collections.abc import Iterator

from fastwarc.warc import ArchiveIterator, WarcRecord, WarcRecordType

from pipeline.data.read import streams
from pipeline.data.read.documents import Bad, Document, ReadOptions
from pipeline.data.read.formats import html
from pipeline.data.read.formats.checks import UnusableError, small, too_large, utf8
from pipeline.data.read.sources import Span

_WANTED = WarcRecordType.response | WarcRecordType.conversion
_PAGES = ("text/html", "application/xhtml+xml")


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad]:
    """The documents of the archive; records that hold no page (images, redirections, errors of the server) are passed over."""
    source, position = span.source, None
    with streams.open_bytes(source.path) as handle:
        stream = streams.UntilDamage(handle)
        try:
            for record in ArchiveIterator(io.BufferedReader(stream), record_types=_WANTED, parse_http=False, stream_detect=False):
                position = record.stream_pos
                try:
                    found = _document(record, options)
                except UnusableError as error:
                    if stream.damage is None:  # else this is where it shows
                        yield Bad(source.label, f"byte {position}", str(error))
                    continue
                if found is not None:
                    text, title = found
                    about = {"url": record.headers.get("WARC-Target-URI"), "date": record.headers.get("WARC-Date"), "title": title}
                    yield Document(source.name, position, text, small((k, v) for k, v in about.items() if v), source.corpus)
        except OSError as error:
            if stream.damage is None:
                where = "" if position is None else f"after the record at byte {position}"
                yield Bad(source.label, where, f"holds no WARC record that can be read: {error}")
    if stream.damage is not None:
        raise stream.damage


def _document(record: WarcRecord, options: ReadOptions) -> tuple[str, str] | None:
    """(text, title) of a record, None if it holds no page.

    Raises:
        UnusableError: it is cut short, too large, or cannot be decoded.
    """
    if record.headers.get("Content-Length") is None:
        raise UnusableError("is cut within its header")
    if record.content_length > options.document_bytes:
        raise UnusableError(too_large(options))
    length = record.content_length
    block = record.reader.read(length)
    if len(block) < length:
        raise UnusableError(f"is cut short: {len(block)} of {length} bytes are there")
    if record.record_type == WarcRecordType.conversion:
        return utf8(block), ""
    return _page(block, options)


def _page(block: bytes, options: ReadOptions) -> tuple[str, str] | None:
    """(text, title) of an HTTP response, None if it is not a page.

    Raises:
        UnusableError: its body cannot be decoded, or is too large.
    """
    response = WarcRecord()  # of its own: where decoding fails, the archive goes on
    response.set_bytes_content(block)
    response.is_http = True
    try:
        response.parse_http(auto_decode="all")
        status = response.http_headers.status_code if response.http_headers else None
        if status is None or status // 100 != 2 or response.http_content_type not in _PAGES:
            return None
        return html.page(response.reader.read(options.document_bytes + 1), response.http_charset, options)
    except OSError as error:
        raise UnusableError(f"holds an HTTP response that cannot be decoded: {error}") from error
