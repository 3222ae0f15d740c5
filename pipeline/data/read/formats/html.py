"""Web pages: the visible text, or only the main content. Uses resiliparse (https://resiliparse.chatnoir.eu)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import detect_encoding, map_encoding_to_html5
from resiliparse.parse.html import HTMLTree

from pipeline.data.read.documents import Bad, Document, ReadOptions, library_reason
from pipeline.data.read.formats.checks import UnusableError, check_size, document_of_file
from pipeline.data.read.input_files import Span

_DEPTH = 1000
_RESERVED = {
    "tdm-reservation": re.compile(r"\s*1\s*"),
    "robots": re.compile(r".*\bnoai\b.*", re.IGNORECASE | re.DOTALL),
    "content-usage": re.compile(r".*\btrain-ai\s*=\s*n\b.*", re.IGNORECASE | re.DOTALL),
}
"""HTTP header or `<meta>` -> values that reserve text and data mining (W3C TDMRep, 2024), or decline training (IETF AIPREF)."""
_NESTING = re.compile(r"<(/?)(?:div|article)[\s/>]", re.IGNORECASE)


def read(span: Span, options: ReadOptions) -> Iterator[Document | Bad]:
    """Yield the text of the page, with its title in the metadata."""
    return document_of_file(span, options, lambda raw: page(raw, None, options))


def page(raw: bytes, charset: str | None, options: ReadOptions, headers: Iterable[tuple[str, str]] = ()) -> tuple[str, dict[str, str]]:
    """Return the text of a page, which may be empty, and its metadata: `title`, and in `reserved` the names of headers that reserve rights.

    Args:
        charset: the encoding from the HTTP header; None uses the one that the page declares, or else a detected one.
        headers: of the HTTP response.

    Raises:
        UnusableError: the page is too large, too deeply nested, or not HTML.
    """
    check_size(len(raw), options)
    content = _decoded(raw, charset)
    if options.main_content and _depth(content) > _DEPTH:
        raise UnusableError(f"nests more than {_DEPTH} elements")
    try:
        tree = HTMLTree.parse(content)
        text = extract_plain_text(tree, preserve_formatting=True, main_content=options.main_content)
        tags = tree.document.query_selector_all("meta[name]") if tree.document else []
        named = [(tag.getattr("name") or "", tag.getattr("content") or "") for tag in tags]
        found = {"title": (tree.title or "").strip(), "reserved": ", ".join(sorted({*_reservations([*headers, *named])}))}
        return text, {name: value for name, value in found.items() if value}
    except Exception as error:  # the parser's exceptions have no common base
        raise UnusableError(f"cannot be parsed as HTML: {library_reason(error)}") from error


def _reservations(headers: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, value in ((name.strip().lower().removeprefix("x-").replace("robots-tag", "robots"), value) for name, value in headers):
        if name in _RESERVED and _RESERVED[name].fullmatch(value):
            yield name


def _decoded(raw: bytes, charset: str | None) -> str:
    """Decode the page: in the declared encoding, or if that fails, in the detected one with replacement characters."""
    declared = charset and map_encoding_to_html5(charset, fallback_utf8=False)
    try:
        content = raw.decode(declared or detect_encoding(raw, from_html_meta=True) or "utf-8")
    except UnicodeDecodeError:
        content = raw.decode(detect_encoding(raw) or "utf-8", "replace")
    return content.removeprefix("\ufeff")


def _depth(content: str) -> int:
    """The nesting depth of the elements that may hold the main content. Extraction takes quadratic time: hours on an adversarial page."""
    depth = deepest = 0
    for tag in _NESTING.finditer(content):
        depth = max(0, depth - 1) if tag[1] else depth + 1
        deepest = max(deepest, depth)
    return deepest
