"""Calls of tools within the process of a test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache

import pytest

from tests.helpers import load_tool

load = cache(load_tool)


@pytest.fixture
def call_tool(monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    """Call a script of tools/ by its name, with arguments; returns the exit code and what it printed."""

    def call(name: str, *arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        try:
            code = load(name).main()
        except SystemExit as end:
            code = end.code
        said = capsys.readouterr()
        return code, said.out + said.err

    return call
