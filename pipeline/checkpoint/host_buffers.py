"""The bytes of tensors in host memory, without a second copy of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Bytes of each of the two pinned buffers that a tensor of a GPU passes through.
BOUNCE = 32 << 20


def host_bytes(values: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a flat tensor, in order. A buffer may be overwritten when the next one is requested.

    A tensor in host memory is not copied. That of a GPU passes through two pinned buffers: one is filled while the caller uses the other.
    """
    flat = values.view(torch.uint8)
    if flat.device.type == "cpu":
        yield flat.numpy().data
        return
    chunks = flat.split(BOUNCE)
    buffers = [torch.empty(min(BOUNCE, len(flat)), dtype=torch.uint8, pin_memory=True) for _ in chunks[:2]]
    copied = [torch.cuda.Event() for _ in buffers]

    def start(number: int) -> None:
        buffers[number % 2][: len(chunks[number])].copy_(chunks[number], non_blocking=True)
        copied[number % 2].record()

    start(0)
    for number, chunk in enumerate(chunks):
        copied[number % 2].synchronize()
        if number + 1 < len(chunks):
            start(number + 1)
        yield buffers[number % 2][: len(chunk)].numpy().data
