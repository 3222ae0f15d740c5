"""Breaks of the graphs of torch.compile, with the line of code and the reason, as the compiler logs them.

Its counters lack some: branches that depend on values, and functions that are left uncompiled because they break in a loop.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch._logging._internal import getArtifactLogger

from pipeline.rehearsal.source_lines import PACKAGE

_BREAK = re.compile(r"Graph break .*?user code at (?P<file>.+?):(?P<line>\d+)\nGraph Break Reason: (?P<text>.*)", re.DOTALL)
_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+)')
#: The message begins with it if the whole function stays uncompiled.
_SKIPPED = "Failed to handle graph break gracefully"
#: Paragraphs before the reason: that there is a break, or that it could not be handled.
_INTRODUCTIONS = (_SKIPPED, "Encountered graph break")


@dataclass(frozen=True)
class GraphBreak:
    """A break.

    Attributes:
        site: innermost line of the package, "layers/moe.py:152", or of any code if there is none.
        reason: of the compiler.
        skipped: whether the whole function is left uncompiled.
    """

    site: str
    reason: str
    skipped: bool = False

    def __str__(self) -> str:
        return f"{self.site}  {self.reason}" + ("; the whole function is not compiled" if self.skipped else "")


@contextmanager
def listening(folder: Path = PACKAGE) -> Iterator[Counter[GraphBreak]]:
    """A context whose value counts the breaks in it.

    Args:
        folder: whose code is meant.
    """
    logger = getArtifactLogger("torch._dynamo.symbolic_convert", "graph_breaks")
    handler = _Listener(f"{folder}/")
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False  # nobody asked for these messages
    try:
        yield handler.breaks
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


class _Listener(logging.Handler):
    """Reads the breaks from messages of the compiler."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.breaks: Counter[GraphBreak] = Counter()
        self._folder = folder
        self._sites: dict[tuple[str, str], str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Count a break."""
        message = record.getMessage()
        if (match := _BREAK.match(message)) is not None:
            text, _, stack = match["text"].partition("\nUser code traceback:")
            self.breaks[GraphBreak(self._site((match["file"], match["line"]), stack), _reason(text), text.startswith(_SKIPPED))] += 1

    def _site(self, place: tuple[str, str], stack: str) -> str:
        """The line of the package for a place; the compiler gives the stack with the first break at a place only."""
        frames = [place, *((frame["file"], frame["line"]) for frame in reversed(list(_FRAME.finditer(stack))))]
        inside = (f"{file.removeprefix(self._folder)}:{line}" for file, line in frames if file.startswith(self._folder))
        if (site := next(inside, None)) is not None:
            return self._sites.setdefault(place, site)
        return self._sites.get(place, ":".join(place))


def _reason(text: str) -> str:
    """The kind of a break and its explanation, in one line."""
    parts = [part for part in text.split("\n\n") if part.strip() and not part.startswith(_INTRODUCTIONS)]
    lines = [line.strip() for line in parts[0].splitlines()] if parts else [""]
    explained = next((line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")), "")
    return f"{lines[0]}: {explained}" if explained else lines[0]
