"""Which operations of a forward and a backward pass belong to functions that torch.compile leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.layers.uncompiled import Calls, noted, uncompiled


class Graphs(TorchDispatchMode):
    """Collects the graph of each operator that computes something."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls, self.found = calls, list[tuple[str, int | None]]()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = torch._C._current_autograd_node()
        self.found.append((operator.overloadpacket.__name__, self.calls.graph(None if node is None else node._sequence_nr())))
        return operator(*args, **(kwargs or {}))


@uncompiled
def inner(x: torch.Tensor) -> torch.Tensor:
    return x.exp()


@uncompiled
def outer(x: torch.Tensor) -> torch.Tensor:
    return inner(x.sin()).tanh()


def test_operations_of_uncompiled_functions_and_of_their_backward_pass_are_in_no_graph():
    x, calls = torch.ones(2, requires_grad=True), Calls()
    with noted(calls), Graphs(calls) as graphs:
        y = outer(x.relu()).sigmoid()
        inner(y).sum().backward()
    found = [(name, graph) for name, graph in graphs.found if name not in ("ones_like", "expand", "mul", "detach")]
    forward, backward = found[:7], found[7:]
    assert forward == [("relu", 0), ("sin", None), ("exp", None), ("tanh", None), ("sigmoid", 1), ("exp", None), ("sum", 2)]
    assert backward == [("sigmoid_backward", 1), ("tanh_backward", None), ("cos", None), ("threshold_backward", 0)]


def test_a_call_that_fails_has_ended():
    calls = Calls()
    with noted(calls):
        with pytest.raises(TypeError):
            inner()
        assert calls.graph(None) == 1


def test_calls_are_noted_only_inside_of_the_context():
    calls = Calls()
    with noted(calls):
        inner(torch.ones(1))
    inner(torch.ones(1))
    assert calls.graph(None) == 1
