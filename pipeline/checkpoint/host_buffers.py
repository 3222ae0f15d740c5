"""The bytes of tensors in host memory, without a second copy of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

#: Bytes of each of the two pinned buffers that a tensor of a GPU passes through.
BOUNCE = 32 << 20


class Event(Protocol):
    """What is used of torch.cuda.Event."""

    def record(self) -> object:
        """Mark this moment in the work of the GPU."""

    def synchronize(self) -> object:
        """Wait until the GPU has come to the mark."""


def host_bytes(values: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a flat tensor, in order. A buffer may be overwritten when the next one is requested.

    A tensor in host memory is not copied. That of a GPU passes through two pinned buffers: one is filled while the caller uses the other.
    """
    flat = values.view(torch.uint8)
    if flat.device.type == "cpu":
        yield flat.numpy().data
        return
    buffers = [torch.empty(min(BOUNCE, len(flat)), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    yield from through_buffers(flat, buffers, [torch.cuda.Event(), torch.cuda.Event()])


def through_buffers(flat: Tensor, buffers: Sequence[Tensor], copied: Sequence[Event]) -> Iterator[memoryview]:
    """Copy bytes through two buffers in turn; the next copy begins before the caller gets the one before.

    Args:
        flat: the bytes.
        buffers: two of the same size, in host memory.
        copied: an event for each.
    """
    chunks = flat.split(len(buffers[0]))

    def begin(number: int) -> None:
        buffers[number % 2][: len(chunks[number])].copy_(chunks[number], non_blocking=True)
        copied[number % 2].record()

    begin(0)
    for number, chunk in enumerate(chunks):
        copied[number % 2].synchronize()
        if number + 1 < len(chunks):
            begin(number + 1)
        yield buffers[number % 2][: len(chunk)].numpy().data
