"""Renders the HTML pages of the reports from the templates in pages/. Pages load nothing, and everything that they show is escaped."""

from __future__ import annotations

import datetime
import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

from pipeline.common.texts import count

if TYPE_CHECKING:
    from jinja2 import Environment


@dataclass(frozen=True)
class Bar:
    """A cell of a table: a share as a bar and in percent."""

    part: float
    whole: float

    @property
    def width(self) -> str:
        """Length of the bar, percent."""
        return f"{min(100, 100 * self.part / self.whole if self.whole else 0):.1f}"

    @property
    def text(self) -> str:
        """The share in percent."""
        return share(self.part, self.whole)


@dataclass(frozen=True)
class Bold:
    """A cell of a table in bold type."""

    text: str


def render(template: str, title: str, **values: Any) -> str:
    """Return a page.

    Args:
        template: file name in pages/.
        values: variables of the template; one that it reads and that is missing is an error. `refresh`: seconds, None for never.
    """
    made = f"tannschen {_version()}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    return _environment().get_template(template).render(**{"title": title, "made": made, "refresh": None, **values})


def macros(template: str = "macros.html.jinja") -> Any:
    """Return the macros of a template as functions."""
    return _environment().get_template(template).module


@cache
def _environment() -> Environment:
    """Return the environment of all templates."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # most stages write no page

    environment = Environment(
        loader=PackageLoader("pipeline.common", "pages"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"cell": cell, "mb": megabytes}
    environment.tests |= {"bar": lambda value: isinstance(value, Bar), "bold": lambda value: isinstance(value, Bold)}
    environment.globals |= {"share": share, "count": count, "numeric_columns": numeric_columns, "changes": changes}
    return environment


def _version() -> str:
    """Return the version of the program."""
    try:
        return metadata.version("tannschen")
    except metadata.PackageNotFoundError:
        return "of an unknown version"


def cell(value: object) -> str:
    """Return a value as text: integers with thousands separators."""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def share(part: float, whole: float) -> str:
    """Return a share in percent."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def megabytes(size: int) -> str:
    """Return bytes in MB."""
    return f"{size / 1e6:,.1f}" if abs(size) >= 1e6 else f"{size / 1e6:.3g}"


def numeric_columns(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[bool]:
    """Return for each column of a table whether it has numbers only, and one at least; empty cells and "-" are none."""

    def is_number(value: object) -> bool:
        return isinstance(value, int) or bool(re.fullmatch(r"[\d.,]+(?:e[+-]?\d+)?(?: %)?", str(value)))

    columns = [[row[column] for row in rows if row[column] not in ("", "-")] for column in range(len(head))]
    return [bool(column) and all(map(is_number, column)) for column in columns]


def changes(before: str, after: str, limit: int) -> list[tuple[str, str]]:
    """Return the text after a change in pieces that are "equal", "removed" or "added".

    Args:
        before, after: excerpts that begin at the same place.
        limit: length of an excerpt that is cut at its end; what follows there in one of them only is not a difference.
    """
    old, new = (re.findall(r"\w+|\s+|.", text) for text in (before, after))
    opcodes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    cut = max(len(before), len(after)) >= limit
    while cut and len(opcodes) > 1 and opcodes[-1][0] != "equal":
        opcodes.pop()
    pieces = []
    for kind, first, last, begin, end in opcodes:
        removed, added = "".join(old[first:last]), "".join(new[begin:end])
        pieces += [("equal", added)] if kind == "equal" else [("removed", _visible(removed)), ("added", _visible(added))]
    return [(kind, text) for kind, text in [*pieces, ("equal", "…" if cut else "")] if text]


def _visible(text: str) -> str:
    """Mark characters that have no shape, so that their removal can be seen."""
    text = text.replace("\n", "⏎\n").replace("\t", "→\t").replace("\r", "␍")
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u200b\u2028\u2060\ufeff]", lambda match: f"[U+{ord(match[0]):04X}]", text)
