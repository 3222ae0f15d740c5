"""Counts the bytes of all tensors of a process: torch's MemTracker counts them too, but not through several micro-batches of one step."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorMemory(TorchDispatchMode):
    """Counts live storages, whether or not the allocator returns their memory to the operating system.

    Attributes:
        state: bytes of the tensors that exist when it is made: between two steps, weights, master weights and moments.
        current: bytes of the tensors that exist now.
        peak: their maximum.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.current = self.peak = 0
        gc.collect()
        for tensor in gc.get_objects():
            # The local tensors of a DTensor are objects of their own.
            if type(tensor) in (Tensor, nn.Parameter) and tensor.device.type != "meta":
                self._count(tensor.untyped_storage())
        self.state = self.current

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if type(tensor) in (Tensor, nn.Parameter):
                self._count(tensor.untyped_storage())
        return output

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._freed, key)
        self.current += storage.nbytes() - self._sizes.get(key, 0)
        self._sizes[key] = storage.nbytes()
        self.peak = max(self.peak, self.current)

    def _freed(self, key: int) -> None:
        self.current -= self._sizes.pop(key, 0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count within this context, storages that are resized too: partitioned weights are freed this way."""
        resize: Callable[..., Any] = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._count(storage)
            return result

        torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign, assignment] # its base class names another type of storage
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
