"""Functions that torch.compile leaves out of its graphs, and which operations belong to them."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo  # as torch.compiler.disable, which imports the compiler at once

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Calls:
    """The calls of uncompiled functions in a forward pass. They divide it, and its backward pass, into graphs."""

    def __init__(self) -> None:
        #: Where a call begins or ends: the number of autograd nodes before it. PyTorch numbers the nodes of a thread in order.
        self._nodes: list[int] = []
        self._depth = 0

    def begin(self) -> None:
        """Note that a call begins; a call inside of another one belongs to that."""
        if not self._depth:
            self._nodes.append(torch._C._autograd._get_sequence_nr())
        self._depth += 1

    def end(self) -> None:
        """Note that a call ends."""
        self._depth -= 1
        if not self._depth:
            self._nodes.append(torch._C._autograd._get_sequence_nr())

    def graph(self, node: int | None) -> int | None:
        """Return the number of the graph that an operation belongs to, None for an uncompiled function.

        Args:
            node: the autograd node that the operation is the backward pass of; None in a forward pass, for the present.
        """
        crossed = len(self._nodes) if node is None else bisect_right(self._nodes, node)
        return crossed // 2 if crossed % 2 == 0 else None


_CALLS: ContextVar[Calls | None] = ContextVar("_CALLS", default=None)


@contextmanager
def noted(calls: Calls) -> Iterator[None]:
    """Note the calls of uncompiled functions."""
    token = _CALLS.set(calls)
    try:
        yield
    finally:
        _CALLS.reset(token)


def uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Leave a function, what it calls and its backward pass out of the graphs of torch.compile, as torch.compiler.disable."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if (calls := _CALLS.get()) is None:
            return function(*args, **kwargs)
        calls.begin()
        try:
            return function(*args, **kwargs)
        finally:
            calls.end()

    disabled: Callable[_P, _R] = _disable_dynamo(run)
    return disabled
