"""Inputs of blocks in host memory between forward and backward pass (training.activation_checkpointing=offload).

A recomputed block keeps its input alone. It is copied to pinned host memory while the block computes, and back while the block behind it
runs its backward pass, on a stream of its own. The block that runs its backward pass first has its input still on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class InputOffload:
    """Moves the inputs of the blocks of one stage. A CPU copies at once, in its own memory."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: _Input | None = None

    def apply(self, block: nn.Module, *, first: bool) -> None:
        """Offload the first argument of a block, after its recomputation and compilation are set; `first` begins a micro-batch."""
        if block._compiled_call_impl is not None:
            block._compiled_call_impl = partial(self._call, block._compiled_call_impl, first)
        else:
            block.forward = partial(self._call, block.forward, first)

    def _call(self, block: Callable[..., Tensor], first: bool, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not (torch.is_grad_enabled() and x.is_contiguous()):
            return block(x, *args, **kwargs)
        before = None
        if self._last is not None:
            self._last.leave_device()  # its copy had the time of a block
            before = self._last if self._last.read and not first else None
        self._last = _Input(x, before, self.stream)
        with saved_tensors_hooks(self._last.pack, _unpack):
            output = block(x, *args, **kwargs)
        self._last.read = output.requires_grad
        return output


class _Input:
    """The input of a block of a micro-batch: on the device, in host memory, or in both.

    Attributes:
        read: whether its block has a backward pass, unlike frozen blocks. Others are not fetched: nobody would hold the memory meanwhile.
    """

    def __init__(self, x: Tensor, before: _Input | None, stream: torch.cuda.Stream | None) -> None:
        self._device, self._before, self._stream, self.read = x.device, before, stream, False
        self._x: Tensor | None = x.detach()
        self._copied: torch.cuda.Event | None = None
        self._host = torch.empty_like(x, device="cpu", pin_memory=stream is not None)
        self._copy(self._host, self._x)  # not when it is saved: a compiled block saves at its end

    def pack(self, saved: Tensor) -> Tensor | _Input:
        """Take the place of the input where it is saved; weights and whatever else is saved stay as they are."""
        x = self._x
        is_input = x is not None and (saved.data_ptr(), saved.shape, saved.stride()) == (x.data_ptr(), x.shape, x.stride())
        return self if is_input else saved

    def leave_device(self) -> None:
        """Free the memory of the device, which later work of the current stream may use, after the copy."""
        self._wait()
        self._x = None

    def bring(self) -> None:
        """Begin the copy back, unless the input is on the device."""
        if self._x is None:
            self._x = torch.empty_like(self._host, device=self._device)
            self._copy(self._x, self._host)

    def on_device(self) -> Tensor:
        """The input for the backward pass, for which the one of the block before is fetched."""
        self.bring()
        if self._before is not None:
            self._before.bring()
            self._before = None  # its host memory is freed with its graph
        self._wait()
        x, self._x = self._x, None
        assert x is not None
        return x

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._copied = self._stream.record_event()

    def _wait(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)


def _unpack(saved: Tensor | _Input) -> Tensor:
    return saved.on_device() if isinstance(saved, _Input) else saved
