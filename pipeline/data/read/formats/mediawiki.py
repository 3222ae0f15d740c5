"""XML dumps of MediaWiki, such as Wikipedia's: one document per page, in wikitext. Redirects and talk are not read."""

from __future__ import annotations

from collections.abc import Iterator
from xml.etree import ElementTree

from pipeline.data.read import streams
from pipeline.data.read.documents import Bad, Document, ReadOptions, Skipped, utf8_length
from pipeline.data.read.formats.checks import document_of
from pipeline.data.read.input_files import Span


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad | Skipped]:
    """Yield the newest text of the pages of the main namespace; offsets are numbers of pages.

    Raises:
        DamageError: the file is not XML from here on.
    """
    source, number = span.file, -1
    with streams.open_bytes(source.path, span.section) as handle:
        events = ElementTree.iterparse(handle, ("start", "end"))
        try:
            _, root = next(events)
            for event, page in events:
                if event == "start" or page.tag.rpartition("}")[2] != "page":
                    continue
                number += 1
                text, namespace = ([None, *page.iterfind("{*}revision/{*}text")][-1].text or ""), page.findtext("{*}ns", "0")
                if page.find("{*}redirect") is not None or namespace != "0":
                    yield Skipped("wiki page of another namespace" if namespace != "0" else "wiki page that redirects", utf8_length(text))
                else:
                    record = {options.text_field: text, "title": page.findtext("{*}title"), "id": page.findtext("{*}id")}
                    yield document_of(record, source, number, "page", options, check=False)
                root.clear()
        except ElementTree.ParseError as error:
            raise streams.DamageError(handle.tell(), f"not XML: {error}") from error
