"""Breaks of compiled graphs are named with the line of code and the reason, also those that the compiler does not count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pipeline.rehearsal import graph_breaks
from pipeline.rehearsal.graph_breaks import GraphBreak
from tests.helpers import one_in


@torch.compiler.disable
def uncompiled(x: Tensor) -> Tensor:
    return x + 1


def printed(x: Tensor) -> Tensor:
    y = x * 2
    print("a line")  # HERE print
    return y + 1


def branch(x: Tensor) -> Tensor:
    if x.sum() > 0:  # HERE branch
        return x + 1
    return x - 1


def value(x: Tensor) -> Tensor:
    return x + x.sum().item()  # HERE item


def chosen(x: Tensor) -> Tensor:
    return x[x > 0].sum()  # HERE boolean index


def in_a_loop(x: Tensor) -> Tensor:
    for _ in range(2):
        x = uncompiled(x * 2)  # HERE loop
    return x


def called(x: Tensor) -> Tensor:
    return uncompiled(x + 1) * 2  # HERE disable


def recomputed(x: Tensor) -> Tensor:
    result: Tensor = checkpoint(printed, x, use_reentrant=False)
    return result


def whole(x: Tensor) -> Tensor:
    return (x * 2).sin()


def breaks_of(function: Callable[[Tensor], Tensor]) -> list[GraphBreak]:
    """The breaks of a function that is compiled for the first time, and called twice."""
    torch._dynamo.reset()
    with graph_breaks.listening(Path(__file__).parent) as found:
        compiled = torch.compile(function, backend="eager")
        for _ in range(2):
            compiled(torch.ones(4, requires_grad=True))
    return list(found)


def line(comment: str) -> str:
    """The line with a comment."""
    lines = Path(__file__).read_text().splitlines()
    return f"test_graph_breaks.py:{next(number for number, text in enumerate(lines, 1) if text.endswith(f'# HERE {comment}'))}"


@pytest.mark.parametrize(
    ("function", "comment", "said", "skipped"),
    one_in(
        5,
        [
            (printed, "print", "`print`", False),
            (branch, "branch", "data-dependent branching", False),
            (value, "item", "Tensor.item()", False),
            (chosen, "boolean index", "output shape depends on input Tensor data", False),
            (called, "disable", "torch.compiler.disable", False),
            (in_a_loop, "loop", "torch.compiler.disable", True),
            (recomputed, "print", "`print`", False),
        ],
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_break_is_named(function: Callable[[Tensor], Tensor], comment: str, said: str, skipped: bool) -> None:
    (found,) = breaks_of(function)
    assert (found.site, found.skipped) == (line(comment), skipped)
    assert said in found.reason
    assert "\n" not in str(found)


def test_a_whole_graph_has_none() -> None:
    assert breaks_of(whole) == []
