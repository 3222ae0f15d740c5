"""HTML tags and YAML front matter: which of them are markup of a document, and which are its subject."""

from __future__ import annotations

import itertools
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
# Headings and fences. RST also has inline code, code has comments with several # signs, and lines of a root shell begin with one.
_MARKDOWN = re.compile(r"(?:\A|\n\n)#{1,6} \S.*(?:\Z|\n\n)|^[ \t]*(?:```|~~~)", re.MULTILINE)
_LINK = re.compile(r"\]\((?P<target>[^\s()]+)\)")
_TARGET = re.compile(r"[a-z][a-z0-9+.-]*:(?!:)|[/#.]|[^\s]*/|[^\s]*\.[a-z0-9]{2,5}(?:[#?]|$)", re.IGNORECASE)
_LINK_TEXT = 300

# What shows that a tag is the subject of a sentence: the word tag or element beside it, a pair of quotation marks or parentheses around
# it, a backslash before it.
_WORD = r"(?:tags?|elements?|elemente?[ns]?|balises?|éléments?|etiquetas?|elementos?|elementi|тег\w*|элемент\w*)"
_CJK = r"(?:标签|標籤|元素|タグ|要素|태그|요소)"
_NOUN_AFTER = re.compile(rf"[ \t\n-]{{1,2}}{_WORD}\b|\s?{_CJK}(?!</)", re.IGNORECASE)
_NOUN_BEFORE = re.compile(rf"(?:\b{_WORD}\s|{_CJK}\s?)$", re.IGNORECASE)
_CONJUNCTION = r"(?:\s(?:and|or|to|with|und|oder|sowie|et|ou|y|o|e|и|или)\s)"
_ENUMERATION = re.compile(rf"\s*[,/&]\s*|,?{_CONJUNCTION}", re.IGNORECASE)
_PLACEHOLDER = re.compile(rf"\s*(?:\.{{3}}|…)\s*|{_CONJUNCTION}", re.IGNORECASE)
ENCLOSED = ('""', "''", "“”", "„“", "‘’", "«»", "»«", "()", "「」")
_NEEDS_ATTRIBUTES = frozenset({"img", "input", "link", "meta", "source"})

_FRONT_MATTER = re.compile(r"\A---\r?\n(?:[\w-]+:.*\n|[ \t].*\n|- .*\n|\r?\n)+---\r?\n(?!\s*(?:[\w-]+:|-)\s)")


class _Element(NamedTuple):
    """The tag at text[start:end], and the end of its element: that of its closing tag, or its own."""

    start: int
    end: int
    name: str
    element_end: int


def without(text: str) -> str:
    """Remove YAML front matter, and HTML tags if they are markup of this document.

    They are if HTML elements contain more than half of the text, and in Markdown outside code, except for those that a sentence is about.
    Other texts are as often about tags as marked up by them.
    """
    if text.startswith("---"):
        text = _FRONT_MATTER.sub("", text)
    if "<" not in text or not _TAG.search(text):
        return text
    page = _PAGE.match(text) is not None
    whole = [] if page else _elements(text, [], _mentions(text))
    if page or (whole and 2 * _covered(whole) > len(text.strip()) and not code_detection.is_source(text)):
        text = _UNSEEN.sub("", text)
        return _cut(text, _elements(text, [], frozenset() if page else _mentions(text), unclosed=True))
    if _MARKDOWN.search(text) or any(_is_link(text, match) for match in _LINK.finditer(text)):
        return _cut(text, _elements(text, code_detection.protected(text), _mentions(text)), separators=(" ", " "))
    return text


def _is_link(text: str, match: re.Match[str]) -> bool:
    """Whether `](target)` ends a link of Markdown: `x[i](y)` is a call of an entry, and `[i](y)` has no address."""
    start = text.rfind("[", max(0, match.start() - _LINK_TEXT), match.start())
    before = text[start - 1 : start]
    return start >= 0 and not (before.isalnum() or before in tuple("_])")) and _TARGET.match(match["target"]) is not None


def _mentions(text: str) -> frozenset[int]:
    """Where the tags begin that are the subject of a sentence, or no tags at all, such as the parameter of a type in `Box<Link>`."""
    tags = list(_TAG.finditer(text))
    mentioned = {tag.start() for tag in tags if _is_mention(text, tag)}
    pairs = list(itertools.pairwise(tags))
    for tag, following in pairs:  # <b>...</b>, <b> and </b>
        if tag["name"] == following["name"] and following["end"] and _PLACEHOLDER.fullmatch(text, tag.end(), following.start()):
            mentioned |= {tag.start(), following.start()}
    listed = [(tag, following) for tag, following in pairs if _ENUMERATION.fullmatch(text, tag.end(), following.start())]
    for tag, following in [*reversed(listed), *listed]:  # the word is after the last one, or before the first one
        if not mentioned.isdisjoint((tag.start(), following.start())):
            mentioned |= {candidate.start() for candidate in (tag, following) if _stands_alone(text, candidate)}
    return frozenset(mentioned)


def _is_mention(text: str, tag: re.Match[str]) -> bool:
    start, end = tag.span()
    before = text[start - 1 : start]
    if before == "\\" or (before and before + text[end : end + 1] in ENCLOSED):
        return True
    name = tag["name"]
    if not (name.islower() or name.isupper()) or (name.lower() in _NEEDS_ATTRIBUTES and "=" not in tag[0]):
        return True  # it is written as no tag is, or has no effect without the attributes that it lacks
    noun = _NOUN_AFTER.match(text, end) or _NOUN_BEFORE.search(text, max(0, start - 20), start)
    return noun is not None and _stands_alone(text, tag)


def _stands_alone(text: str, tag: re.Match[str]) -> bool:
    """Whether no text touches the inner side of a tag, as none does where a sentence names it."""
    if tag["end"]:
        return not text[max(0, tag.start() - 1) : tag.start()].strip()
    return not text[tag.end() : tag.end() + 1].isalnum() or re.match(_CJK, text[tag.end() : tag.end() + 2]) is not None


def _elements(text: str, spans: list[code_detection.Span], mentions: frozenset[int], unclosed: bool = False) -> list[_Element]:
    """The tags of the markup, in order: of pairs, of elements that have no content and, if wanted, of those without closing tag.

    Args:
        spans: code, whose tags are left out.
        mentions: where the tags begin that are left out, with the other one of their pair.
    """
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
                first = opened[depth][1]
                if mentions.isdisjoint((first.start(), tag.start())):
                    elements += [_Element(*first.span(), name, tag.end()), _Element(*tag.span(), name, tag.end())]
                left, opened[depth:] = opened[depth + 1 :], []
                elements += [
                    _Element(*other.span(), other_name, other.end())
                    for other_name, other in left
                    if unclosed and other_name in _OPTIONAL_END
                ]
    if unclosed:
        elements += [_Element(*tag.span(), name, tag.end()) for name, tag in opened if name in _OPTIONAL_END]
    return sorted(element for element in elements if element.start not in mentions)


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
