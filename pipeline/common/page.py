"""The HTML of the reports: one style, tables that turn into cards on a narrow screen, and differences of texts. Pages load nothing."""

from __future__ import annotations

import datetime
import difflib
import html
import re
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any

_STYLE = """
:root { --text: #1d2329; --soft: #5b6570; --line: #d7dce1; --back: #f6f7f8; --good: #2e7d4f; --bad: #b3402e; --link: #1c5d99 }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 1.5rem auto; padding: 0 1rem; color: var(--text); background: #fff }
h1 { font-size: 1.5rem; margin: 0 0 .3rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; border-bottom: 1px solid var(--line) }
p { margin: .4rem 0 } .soft { color: var(--soft); font-size: 13px; overflow-wrap: anywhere }
.verdict { border-left: 5px solid var(--good); background: var(--back); padding: .7rem 1rem; margin: 1rem 0 }
.verdict > b { font-size: 1.15rem }
.warning { border-left: 5px solid var(--bad); background: #fbefed; padding: .5rem 1rem; margin: .5rem 0 }
table { border-collapse: collapse; margin: .5rem 0; max-width: 100% } th { font-weight: 600; border-bottom: 1px solid #8a949e }
th, td { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top; overflow-wrap: anywhere }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
.bar { display: inline-block; width: 7rem; height: .7rem; background: #e4e8eb; vertical-align: middle; margin-right: .5rem }
.bar i { display: block; height: 100%; background: var(--good) }
details { margin: .3rem 0 } summary { cursor: pointer; color: var(--link) } summary b { color: var(--text) }
pre { white-space: pre-wrap; overflow-wrap: anywhere }
pre { background: var(--back); padding: .5rem .7rem; margin: .2rem 0 .7rem; font-size: 13px }
del { background: #f7cfc8; color: #7d1f10 } ins { background: #cdeed6; color: #14532d; text-decoration: none }
.token { background: #e3edf7; border-radius: 2px; margin-right: 1px } .token:nth-child(even) { background: #f5e9d3 }
@media (max-width: 560px) {
  body { margin: .7rem auto; padding: 0 .7rem } .wide thead { display: none } .wide, .wide tbody { display: block; width: 100% }
  .wide tr { display: block; border-top: 1px solid var(--line); padding: .35rem 0 }
  .wide td { display: flex; justify-content: space-between; gap: 1rem; padding: .1rem 0; text-align: right }
  .wide td::before { content: attr(data-name); color: var(--soft); text-align: left; flex: none; max-width: 50% }
  .wide td:first-child { font-weight: 600; text-align: left } .wide td:first-child::before, .wide td:empty { display: none }
}
"""


class Raw(str):
    """Text that is already HTML."""


def escaped(value: object) -> str:
    """A value as HTML: integers with thousands separators, Raw unchanged, other text escaped."""
    if isinstance(value, Raw):
        return value
    return html.escape(f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value))


def whole_page(title: str, parts: Iterable[str]) -> str:
    """A page with a heading, the version of the program and the date of today (UTC)."""
    made = f"tannschen {_version()}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    head = "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width, initial-scale=1'>"
    return "\n".join([f"{head}<title>{title}</title><style>{_STYLE}</style>", f"<h1>{title}</h1><p class=soft>{made}</p>", *parts, ""])


def _version() -> str:
    try:
        return metadata.version("tannschen")
    except metadata.PackageNotFoundError:
        return "of an unknown version"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A table; columns of numbers are right-aligned. On a narrow screen every row of a table with three or more columns becomes a card."""

    def number(value: object) -> bool:
        return isinstance(value, int) or bool(re.fullmatch(r"[\d.,]+(?:e[+-]?\d+)?(?: %)?", str(value)))

    columns = [[row[column] for row in rows if row[column] not in ("", "-")] for column in range(len(head))]
    right = [bool(column) and all(map(number, column)) for column in columns]
    titles = "".join(f"<th{' class=n' * side}>{escaped(title)}</th>" for title, side in zip(head, right, strict=True))
    lines = []
    for row in rows:
        cells = (
            f'<td{" class=n" * side} data-name="{escaped(title)}">{escaped(value)}</td>'
            for title, value, side in zip(head, row, right, strict=True)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    wide = " class=wide" * (len(head) > 2)
    return f"<table{wide}><thead><tr>{titles}</tr></thead><tbody>" + "\n".join(lines) + "</tbody></table>"


def share(part: float, whole: float) -> str:
    """A share in percent."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def bar(part: float, whole: float) -> Raw:
    """A share as a bar and in percent."""
    width = 100 * part / whole if whole else 0
    return Raw(f"<span><span class=bar><i style='width:{min(100, width):.1f}%'></i></span>{share(part, whole)}</span>")


def details(summary: str, content: str) -> str:
    """Content that is shown on a click on its summary; both are HTML."""
    return f"<details><summary>{summary}</summary>{content}</details>"


def settings(values: dict[str, Any]) -> str:
    """The settings of a run, hidden until they are asked for."""
    lines = (f"<div class=soft><b>{escaped(key)}</b> {escaped(str(value))}</div>" for key, value in sorted(values.items()))
    return details("Settings", "".join(lines))


def difference(before: str, after: str, limit: int) -> str:
    """The text after a change, with what was removed and what was added highlighted.

    Args:
        before, after: excerpts that begin at the same place.
        limit: length of an excerpt that is cut at its end; what follows there in one of them only is not a difference.
    """
    old, new = (re.findall(r"\w+|\s+|.", text) for text in (before, after))
    changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    cut = max(len(before), len(after)) >= limit
    while cut and len(changes) > 1 and changes[-1][0] != "equal":
        changes.pop()
    shown = []
    for kind, first, last, begin, end in changes:
        removed, added = html.escape("".join(old[first:last])), html.escape("".join(new[begin:end]))
        if kind == "equal":
            shown.append(added)
            continue
        shown.append(f"<del>{_visible(removed)}</del>" if removed else "")
        shown.append(f"<ins>{_visible(added)}</ins>" if added else "")
    return f"<pre>{''.join(shown)}{'…' if cut else ''}</pre>"


def _visible(text: str) -> str:
    """Mark characters that have no shape, so that their removal can be seen."""
    text = text.replace("\n", "⏎\n").replace("\t", "→\t").replace("\r", "␍")
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u200b\u2028\u2060\ufeff]", lambda found: f"[U+{ord(found[0]):04X}]", text)
