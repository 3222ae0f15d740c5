"""Calls of the driver without a GPU in single steps: launches, products, and waits of the host with the line of code."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pipeline.rehearsal.device_record import DeviceRecord, EntryKind, site

#: In place of a line of code: an operator of PyTorch, in the backward pass.
BACKWARD = "(backward pass)"


@dataclass(frozen=True)
class Launches:
    """Numbers of what was queued.

    Attributes:
        kernels: of PyTorch and of compiled code.
        products: matrix products of cuBLAS.
        copies: copies and fills.
        events: recorded, and waited for by streams.
    """

    kernels: int = 0
    products: int = 0
    copies: int = 0
    events: int = 0

    def __sub__(self, other: Launches) -> Launches:
        """What was queued after `other`."""
        return Launches(
            self.kernels - other.kernels, self.products - other.products, self.copies - other.copies, self.events - other.events
        )


class DeviceCalls:
    """What the driver counts and records, and how much memory it has.

    Args:
        outside: bytes of the device that are not PyTorch's.
    """

    def __init__(self, outside: int) -> None:
        self.record, self._outside = DeviceRecord(), outside
        self.record.hold(outside)

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        """A context in which the device has more memory than any job needs; what the allocator keeps of it is given back at the end."""
        self.record.hold(-(1 << 50))
        try:
            yield
        finally:
            torch.cuda.empty_cache()
            self.record.hold(self._outside)

    def reset(self) -> None:
        """Count from zero."""
        self.record.reset_counts()

    def launches(self) -> Launches:
        """What was queued since `reset`."""
        kernels = products = copies = events = 0
        for name, count in self.record.counts().items():
            lower = name.lower()
            if "launch" in lower:
                kernels += count
            elif lower.startswith("cublas") and ("gemm" in lower or lower.endswith("matmul")):
                products += count
            elif "memcpy" in lower or "memset" in lower:
                copies += count
            elif "eventrecord" in lower or "streamwaitevent" in lower:
                events += count
        return Launches(kernels, products, copies, events)

    @contextmanager
    def recorded(self, waits: Counter[tuple[str, str]], kernels: Counter[str]) -> Iterator[None]:
        """Record a step.

        Args:
            waits: (function of the driver, line of code) -> count, to which the waits of the host are added.
            kernels: name -> count, to which the launches are added.
        """
        lines: dict[int, str] = {}
        caller = threading.get_native_id()
        self.record.start()
        try:
            with self.record.on_host_wait(lambda number: lines.update({number: site() or _place(caller)})):
                yield
        finally:
            self.record.stop()
        entries = self.record.take()
        names: Counter[int] = Counter(entries["object"][entries["kind"] == EntryKind.KERNEL].tolist())
        for entry in entries[entries["kind"] == EntryKind.KERNEL]:
            address = int(entry["object"])
            if address in names:
                kernels[self.record.name(entry)] += names.pop(address)
        for index in (entries["kind"] == EntryKind.HOST_WAIT).nonzero()[0].tolist():
            waits[self.record.call_name(entries[index]), lines.get(index, "")] += 1


def _place(caller: int) -> str:
    """Where a wait without a line of code is: autograd computes gradients in threads of its own."""
    return "" if threading.get_native_id() == caller else BACKWARD
