"""What a collective leaves in CPU tensors if every rank of the group has the data of this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp


def fill(
    name: str,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    rank: int,
    size: int,
    opts: Any,
    splits: tuple[list[int], list[int]] | None = None,
) -> None:
    """Write the outputs of a collective.

    Args:
        name: of the collective, as Call.name.
        inputs, outputs: of this rank.
        rank: of this process in the group.
        opts: with reduceOp, where the collective reduces.
        splits: rows that are sent to each rank, and received from each; empty lists for even ones.
    """
    with torch.no_grad():
        if name in ("all_reduce", "reduce"):
            for tensor in outputs:
                _reduce(tensor, size, opts.reduceOp)
        elif name == "all_gather":
            _gather(inputs, outputs, size)
        elif name == "gather":
            for output in outputs:
                output.copy_(inputs[0])
        elif name == "reduce_scatter":
            for output, tensor in zip(outputs, inputs, strict=True):
                output.copy_(tensor.reshape(size, *output.shape)[rank])
                _reduce(output, size, opts.reduceOp)
        elif name == "scatter" and inputs:
            outputs[0].copy_(inputs[rank])
        elif name == "all_to_all":
            _all_to_all(inputs, outputs, rank, size, splits)


def _reduce(tensor: Tensor, size: int, op: Any) -> None:
    """Reduce equal values: only a sum and a product differ from them."""
    if op == ReduceOp.SUM:
        tensor.mul_(size)
    elif op == ReduceOp.PRODUCT:
        tensor.pow_(size)


def _gather(inputs: Sequence[Tensor], outputs: Sequence[Tensor], size: int) -> None:
    """Copy the input to every place: into one output for each input, or into one of each rank."""
    if len(inputs) == 1 and len(outputs) == size and outputs[0].numel() == inputs[0].numel():
        for output in outputs:
            output.copy_(inputs[0].view_as(output))
    else:
        for output, tensor in zip(outputs, inputs, strict=True):
            output.view(size, *tensor.shape).copy_(tensor.clone())  # in place, it is a part of the output


def _all_to_all(
    inputs: Sequence[Tensor], outputs: Sequence[Tensor], rank: int, size: int, splits: tuple[list[int], list[int]] | None
) -> None:
    """Every rank sends to this one what this one sends to itself, as far as there is room for it; the rest is zero."""
    if splits is None:
        received, sent = list(outputs), inputs[rank]
    else:
        sent = inputs[0].split(splits[0] or [len(inputs[0]) // size] * size)[rank]
        received = list(outputs[0].split(splits[1] or [len(outputs[0]) // size] * size))
    for output in received:
        output.zero_()
        rows = min(len(output), len(sent))
        output[:rows].copy_(sent[:rows])
