"""Web archives (ISO 28500): pages in HTTP responses, and texts converted by a crawler (WET). Uses fastwarc."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Iterator

from fastwarc.warc import ArchiveIterator, WarcRecord

from pipeline.data.read import streams
from pipeline.data.read.documents import Bad, Document, ReadOptions, Skipped, library_reason
from pipeline.data.read.formats import html
from pipeline.data.read.formats.checks import UnusableError, check_size, small_fields, utf8
from pipeline.data.read.input_files import Span
from pipeline.data.read.suffixes import split_compression

_OTHER_CONTENT = ("resource", "revisit", "continuation")
"""Types of records with content that are not read."""
_CRAWL = ("warcinfo", "request", "metadata")
"""Types of records that describe the crawl, which are not counted."""
_PAGES = ("text/html", "application/xhtml+xml")
_MEDIA_TYPE = re.compile(r"[a-z]{1,20}/[a-z0-9][a-z0-9.+-]{0,60}")
_CHARSET = re.compile(r";\s*charset\s*=\s*[\"']?([\w.:+-]+)", re.IGNORECASE)


class _TruncatedError(UnusableError):
    """The archive ends within a record."""


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad | Skipped]:
    """Yield the documents of the archive, and a Skipped for every record with other content."""
    source, position = span.file, None
    with streams.open_bytes(source.path, span.section) as handle:
        stream = streams.UntilDamage(handle)
        try:
            for record in ArchiveIterator(io.BufferedReader(stream), parse_http=False, stream_detect=False):
                # By its header: fastwarc's own type of a record depends on the case of the header's name.
                kind = (record.headers.get("WARC-Type") or "").strip().lower()
                if kind in _CRAWL:
                    continue
                position = record.stream_pos
                try:
                    document = _document(record, kind, options)
                except UnusableError as error:
                    if stream.damage is None:  # else the error is a consequence of the damage
                        yield Bad(source.label, f"byte {position}", str(error), source.size if isinstance(error, _TruncatedError) else 0)
                    continue
                if isinstance(document, str):
                    yield Skipped(f"WARC record {document}", record.content_length)
                    continue
                text, fields = document
                meta = {"url": record.headers.get("WARC-Target-URI"), "date": record.headers.get("WARC-Date"), **fields}
                yield Document(source.name, position, text, small_fields((k, v) for k, v in meta.items() if v), source.corpus)
        except OSError as error:
            if stream.damage is None:
                where = "" if position is None else f"after the record at byte {position}"
                begin = 0 if split_compression(source.name)[1] else position or 0
                yield Bad(source.label, where, f"contains no readable WARC record: {library_reason(error)}", source.size - begin)


def _document(record: WarcRecord, kind: str, options: ReadOptions) -> tuple[str, dict[str, str]] | str:
    """Return text and metadata of a record, or the reason why it is not a page: an image, a redirect, an HTTP error.

    Args:
        kind: the type of the record, in lower case.

    Raises:
        UnusableError: the record is truncated, too large, or cannot be decoded.
    """
    if record.headers.get("Content-Length") is None:
        raise _TruncatedError("is truncated within its header")
    if kind not in ("response", "conversion"):
        return f"of type {kind}" if kind in _OTHER_CONTENT else "of an unknown type"
    length = record.content_length
    check_size(length, options)
    block = record.reader.read(length)
    if len(block) < length:
        raise _TruncatedError(f"is truncated: {len(block)} of {length} bytes")
    if kind == "conversion":
        return utf8(block), {}
    return _page(block, options)


def _page(block: bytes, options: ReadOptions) -> tuple[str, dict[str, str]] | str:
    """Return text and metadata of an HTTP response, or the reason why it is not a page.

    Raises:
        UnusableError: its body cannot be decoded, or is too large.
    """
    response = WarcRecord()  # a separate record: if decoding fails, the archive can still be read
    response.set_bytes_content(block)
    response.is_http = True
    try:
        response.parse_http(auto_decode="all")
        status = response.http_headers.status_code if response.http_headers else None
        if status is None or status // 100 != 2:
            return "without an HTTP status" if status is None else f"with HTTP status {status}"
        media_type, charset = _content_type(response.http_headers.get("Content-Type") or "")
        if media_type not in _PAGES:
            return f"of media type {media_type}" if media_type else "without a media type"
        headers = ((name, value) for name, value in response.http_headers if name and value)
        return html.page(response.reader.read(options.document_bytes + 1), charset, options, headers)
    except OSError as error:
        raise UnusableError(f"contains an HTTP response that cannot be decoded: {library_reason(error)}") from error


@functools.lru_cache(1024)
def _content_type(header: str) -> tuple[str, str | None]:
    """Return (media type in lower case, charset) of an HTTP header Content-Type; "other" for what is not a media type."""
    media_type = re.split(r"[;,]", header, maxsplit=1)[0].strip().lower()
    charset = _CHARSET.search(header)
    return media_type if not media_type or _MEDIA_TYPE.fullmatch(media_type) else "other", charset and charset[1]
