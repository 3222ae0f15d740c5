"""Code in texts: blocks and inline code of Markdown and reStructuredText, and source files."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable

Span = tuple[int, int]
"""(first character, end)."""

_FENCE = r"^[ \t>]*(?:[-*+][ \t]+)?(?P<fence>`{3,}|~{3,})[^`\n]*\n(?:.*?^[ \t>]*(?P=fence)[`~]*[ \t]*$|.*\Z)"
_INLINE = r"(?<!`)(?P<pair>`{2,3})(?!`)[^\n]+?(?<!`)(?P=pair)(?!`)|(?<!`)(?P<ticks>`{1,3})(?!`)[^`\n]*(?:\n[^`\n]+)?(?P=ticks)(?!`)"
_INDENTED = r"^(?: {4}|\t)[^\n]*"
_FENCE_LINE = re.compile(r"[ \t>]*(?:[-*+][ \t]+)?(?P<fence>```|~~~)[^`]*$")
_INDENTED_LINE = re.compile(r"\n(?: {4}|\t)[^\n]*")
_TICKS = re.compile(r"`[^`\n]*`")
_MARKED = re.compile(f"{_FENCE}|{_INLINE}", re.MULTILINE | re.DOTALL)
_ALL = re.compile(f"{_FENCE}|{_INDENTED}|{_INLINE}", re.MULTILINE | re.DOTALL)

# Comments, headings, list items, tags and links occur in prose and code: they say nothing about what a document is.
_NEUTRAL = re.compile(r"\s*(?:#(?!include|define|if|end)|//|/?\*|--|;|[-=~^\"'+]{3,}|[-<\[>|]|$)|.*\]\(")
_STATEMENT = re.compile(
    r"\s*(?:(?:import|from|package|using|use|namespace|typedef|struct|class|def|fn|func|function|const|let|var|public|private|protected|static"
    r"|return|elif|else|endif|end|fi|done|esac|then|try|except|catch|raise|throw|async|await|export|module|require|@\w+)\b[^.!?]*"
    r"|#(?:include|define|if|end).*|.*(?:[;{}\[\](=\\|&]|\)|\):|\),))\s*$"
)


def is_source(text: str) -> bool:
    """Whether a text as a whole is program code: most of its lines read as statements."""
    sample = text[:10_000]
    if "\n```" in sample:
        return False
    lines = [line for line in sample.split("\n") if not _NEUTRAL.match(line)]
    return len(lines) >= 3 and sum(1 for line in lines if _STATEMENT.match(line)) >= 0.6 * len(lines)


def marked(text: str) -> list[Span]:
    """Fenced blocks and inline code, in order."""
    return [match.span() for match in _MARKED.finditer(text)] if "`" in text or "~~~" in text else []


def protected(text: str) -> list[Span]:
    """What steps that remove markup leave unchanged, in order: fenced, indented and inline code, or an entire source file."""
    if is_source(text):
        return [(0, len(text))]
    if "\n    " in text or "\t" in text or text.startswith("    "):
        return [match.span() for match in _ALL.finditer(text)]
    return marked(text)


def contains(spans: list[Span], position: int) -> bool:
    """Whether a position is in one of the sorted spans."""
    index = bisect_right(spans, position, key=lambda span: span[0]) - 1
    return index >= 0 and position < spans[index][1]


def outside(text: str, spans: list[Span], change: Callable[[str], str]) -> str:
    """Apply a function to the parts of a text between the spans."""
    parts, start = [], 0
    for first, end in spans:
        parts += [change(text[start:first]), text[first:end]]
        start = end
    return "".join([*parts, change(text[start:])])


def prose(text: str) -> str:
    """The text without code if at least a fifth remains; otherwise, as in manual pages, which are indented throughout, the text."""
    if "`" not in text and "\n    " not in text and "\n\t" not in text:
        return text
    rest = _INDENTED_LINE.sub("", "\n" + (_unfenced(text) if "```" in text or "~~~" in text else text))
    rest = (_TICKS.sub(" ", rest) if "`" in rest else rest)[1:]
    return rest if len(rest) >= max(200, len(text) // 5) else text


def _unfenced(text: str) -> str:
    """The lines outside fenced blocks."""
    lines: list[str] = []
    fence = ""  # that of the open block, "" outside blocks
    for line in text.split("\n"):
        if fence:
            fence = "" if line.lstrip(" \t>").startswith(fence) else fence
        elif opened := _FENCE_LINE.match(line):
            fence = opened["fence"]
        else:
            lines.append(line)
    return "\n".join(lines)
