"""HTML tags and YAML front matter: which of them are markup of a document, and which are its subject."""

from __future__ import annotations

import re
from typing import NamedTuple

from pipeline.data.clean import code_detection

_BLOCK = """address article aside blockquote body br center dd details div dl dt fieldset figcaption figure footer form
h1 h2 h3 h4 h5 h6 head header hr html iframe li main nav noscript ol option p picture pre section select summary
table tbody td tfoot th thead title tr ul"""
_INLINE = """a abbr b big cite code del em font i img input ins kbd label link mark meta nobr q s samp script small source
span strong style sub sup tt u var"""
_BLOCKS = frozenset(_BLOCK.split())
_VOID = frozenset({"br", "hr", "img", "input", "link", "meta", "source"})
_OPTIONAL_END = frozenset({"body", "dd", "dt", "head", "html", "li", "option", "p", "tbody", "td", "tfoot", "th", "thead", "tr"})

# A tag as HTML defines it: known name, attributes with a value or one of the boolean ones. `<a <b and c> d` and `<S, T>` are none.
_ATTRIBUTE = (
    r"""\s+(?:[a-zA-Z:@_][\w:.-]*\s*=\s*(?:"[^"<>]*"|'[^'<>]*'|[^\s"'=<>`]+)|checked|disabled|hidden|nowrap|noshade|open|selected)"""
)
_TAG = re.compile(
    rf"<(?P<end>/?)(?P<name>{'|'.join(sorted((_BLOCK + ' ' + _INLINE).split(), key=len, reverse=True))})(?:{_ATTRIBUTE})*\s*/?>", re.I
)
_UNSEEN = re.compile(r"<!--.*?-->|<!doctype[^<>]*>|<(script|style|svg|template)\b[^<>]*>.*?</\1\s*>", re.IGNORECASE | re.DOTALL)
_PAGE = re.compile(r"\s*(?:<!doctype\s+html|<html\b|<\?xml[^>]*>\s*<html\b)", re.IGNORECASE)
# Headings, fences and links. RST also has inline code, code has comments with several # signs, and lines of a root shell begin with one.
_MARKDOWN = re.compile(r"(?:\A|\n\n)#{1,6} \S.*(?:\Z|\n\n)|^[ \t]*(?:```|~~~)|\]\([^\s()]+\)", re.MULTILINE)

_FRONT_MATTER = re.compile(r"\A---\r?\n(?:[\w-]+:.*\n|[ \t].*\n|- .*\n|\r?\n)+---\r?\n(?!\s*(?:[\w-]+:|-)\s)")


class _Element(NamedTuple):
    """The tag at text[start:end], and the end of its element: that of its closing tag, or its own."""

    start: int
    end: int
    name: str
    element_end: int


def without(text: str) -> str:
    """Remove YAML front matter, and HTML tags if they are markup of this document.

    They are if HTML elements contain more than half of the text, and in Markdown outside code. Other texts are as often about tags as
    marked up by them.
    """
    if text.startswith("---"):
        text = _FRONT_MATTER.sub("", text)
    if "<" not in text or not _TAG.search(text):
        return text
    page = _PAGE.match(text) is not None
    whole = [] if page else _elements(text, [])
    if page or (whole and 2 * _covered(whole) > len(text.strip()) and not code_detection.is_source(text)):
        text = _UNSEEN.sub("", text)
        return _cut(text, _elements(text, [], unclosed=True))
    if _MARKDOWN.search(text):
        return _cut(text, _elements(text, code_detection.protected(text)), separators=(" ", " "))
    return text


def _elements(text: str, spans: list[code_detection.Span], unclosed: bool = False) -> list[_Element]:
    """The tags outside the spans, in order: of pairs, of elements that have no content and, if wanted, of those without closing tag."""
    elements: list[_Element] = []
    opened: list[tuple[str, re.Match[str]]] = []
    for tag in _TAG.finditer(text):
        name = tag["name"].lower()
        if code_detection.contains(spans, tag.start()):
            continue
        if name in _VOID:
            elements.append(_Element(*tag.span(), name, tag.end()))
        elif not tag["end"]:
            opened.append((name, tag))
        else:
            depth = next((index for index in range(len(opened) - 1, max(-1, len(opened) - 50), -1) if opened[index][0] == name), None)
            if depth is not None:
                elements += [_Element(*opened[depth][1].span(), name, tag.end()), _Element(*tag.span(), name, tag.end())]
                left, opened[depth:] = opened[depth + 1 :], []
                elements += [
                    _Element(*other.span(), other_name, other.end())
                    for other_name, other in left
                    if unclosed and other_name in _OPTIONAL_END
                ]
    if unclosed:
        elements += [_Element(*tag.span(), name, tag.end()) for name, tag in opened if name in _OPTIONAL_END]
    return sorted(elements)


def _covered(elements: list[_Element]) -> int:
    """The characters in block elements."""
    total = reach = 0
    for element in elements:
        if element.name in _BLOCKS and element.element_end > reach:
            total += element.element_end - max(reach, element.start)
            reach = element.element_end
    return total


def _cut(text: str, elements: list[_Element], separators: tuple[str, str] = ("\n", "\t")) -> str:
    """Remove tags. So that no words are joined, the tag of a block becomes the first separator and that of a table cell the second one."""
    parts: list[str] = []
    start, last = 0, "\n"
    for element in elements:
        piece = text[start : element.start]
        parts.append(piece)
        last = piece[-1:] or last
        start = element.end
        following = text[start : start + 1]
        cell = element.name in ("td", "th")
        separator = separators[cell]
        if element.name in _BLOCKS and last not in ("\n", separator) and following not in ("\n", "\r", separator, ""):
            last = separator
            parts.append(last)
    return "".join([*parts, text[start:]])
