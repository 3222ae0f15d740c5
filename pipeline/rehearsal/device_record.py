"""What the driver without a GPU recorded in this process: counts of calls, and in their order work, events, waits and memory."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType

import numpy as np

PACKAGE = Path(__file__).parents[1]


class EntryKind(IntEnum):
    """What an entry of the record is."""

    KERNEL = 1
    PRODUCT = 2
    COPY = 3
    FILL = 4
    EVENT_RECORD = 5
    STREAM_WAIT = 6
    HOST_WAIT = 7
    ALLOCATE = 8
    RELEASE = 9
    COLLECTIVE = 10
    GRAPH = 11
    QUERY = 12
    TENSOR_ALLOCATE = 13
    TENSOR_FREE = 14


#: An entry of the record, as native/base.h lays it out.
#:   time: CLOCK_MONOTONIC, ns, as time.monotonic_ns().
#:   stream: 0 is the default stream. HOST_WAIT: 2^64 - 1 is the whole device. Blocks of the caching allocator have none: 0.
#:   object: KERNEL, GRAPH: its name, see DeviceRecord.name. EVENT_RECORD, STREAM_WAIT, QUERY, HOST_WAIT: event, 0 for none. COPY, FILL,
#:     PRODUCT, COLLECTIVE: address that is written. ALLOCATE, RELEASE: address of the driver's memory; 0 if the device had none left.
#:     TENSOR_ALLOCATE, TENSOR_FREE: address in the caching allocator.
#:   source: COPY, COLLECTIVE: address that is read. PRODUCT: of its first operand. STREAM_WAIT: stream on which the event was recorded.
#:     TENSOR_ALLOCATE, TENSOR_FREE: bytes that are allocated since then.
#:   size: bytes. PRODUCT: cudaDataType of the operands (14 bf16, 2 fp16, 0 fp32, 28 e4m3, 29 e5m2). COLLECTIVE: of the elements counted.
#:   shape: KERNEL: grid x, y, z, threads of a block. PRODUCT: m, n, k, batch. COLLECTIVE: size of the communicator, root or peer, own rank.
#:     COPY: 1 to the device, 2 to the host, 3 on the device, 0 on the host; 1 if the host's memory is pageable. HOST_WAIT: 1 if the caching
#:     allocator waits.
#:   thread: as threading.get_native_id(). call: index in the table of calls, see DeviceRecord.call_name. kind: an EntryKind.
ENTRY = np.dtype(
    [
        ("time", "<i8"),
        ("stream", "<u8"),
        ("object", "<u8"),
        ("source", "<u8"),
        ("size", "<u8"),
        ("shape", "<u4", 4),
        ("thread", "<u4"),
        ("call", "<u2"),
        ("kind", "<u2"),
    ]
)
WaitCallback = ctypes.CFUNCTYPE(None, ctypes.c_long)
RESULTS = {
    "rehearsal_call_name": ctypes.c_char_p,
    "rehearsal_call_count": ctypes.c_long,
    "rehearsal_call_number": ctypes.c_long,
    "rehearsal_held": ctypes.c_long,
    "rehearsal_lost": ctypes.c_long,
    "rehearsal_take": ctypes.c_long,
    "rehearsal_used": ctypes.c_uint64,
}


class DeviceRecord:
    """The library that this process was started with, see driver.environment.

    Args:
        library: opened library; default: the one that is preloaded.

    Raises:
        RuntimeError: the process was started without the library.
    """

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self.library = library or ctypes.CDLL(None)
        if not hasattr(self.library, "rehearsal_take"):
            raise RuntimeError("this process was not started with the driver without a GPU: use driver.environment")
        for name, kind in RESULTS.items():
            getattr(self.library, name).restype = kind
        number = self.library.rehearsal_call_number()
        self._calls = [self.library.rehearsal_call_name(index).decode() for index in range(number)]
        self._callback: object = None

    def counts(self) -> Counter[str]:
        """Return how often each function was called since the last reset_counts, without those that were not."""
        counts = ((name, self.library.rehearsal_call_count(index)) for index, name in enumerate(self._calls))
        return Counter({name: count for name, count in counts if count})

    def reset_counts(self) -> None:
        """Set all counts to zero."""
        self.library.rehearsal_reset_counts()

    def unknown(self) -> list[str]:
        """The functions that were called although the driver has no answer for them: each call failed."""
        return [name for index, name in enumerate(self._calls) if self.library.rehearsal_call_unknown(index)]

    def start(self, at_most: int = 1 << 24) -> None:
        """Record from now on, up to `at_most` entries of 64 bytes; then the oldest are lost, see `lost`."""
        self.library.rehearsal_record(1, ctypes.c_long(at_most))

    def stop(self) -> None:
        """Record no further. What is recorded stays until it is taken."""
        self.library.rehearsal_record(0, ctypes.c_long(0))

    def take(self) -> np.ndarray:
        """Return the recorded entries, oldest first, and remove them. (entries,) of ENTRY."""
        entries = np.zeros(self.library.rehearsal_held(), ENTRY)
        taken = self.library.rehearsal_take(ctypes.c_void_p(entries.ctypes.data), ctypes.c_long(len(entries)))
        return entries[:taken]

    @property
    def lost(self) -> int:
        """Entries that were overwritten since the process began."""
        return self.library.rehearsal_lost()

    def call_name(self, entry: np.void) -> str:
        """The function whose call an entry is, such as "cudaLaunchKernel"."""
        return self._calls[entry["call"]]

    def name(self, entry: np.void) -> str:
        """The kernel of an entry, as in a C++ program."""
        return demangled(ctypes.string_at(int(entry["object"])).decode())

    def plant(self, address: int, data: bytes) -> None:
        """Set what a copy to the host reads at an address of the device, until something is copied there or its memory is freed."""
        self.library.rehearsal_plant(ctypes.c_uint64(address), data, ctypes.c_uint64(len(data)))

    def hold(self, size: int) -> None:
        """Take bytes off the device's memory for what is not PyTorch's: the CUDA context, NCCL's buffers. A negative number adds memory."""
        self.library.rehearsal_hold(ctypes.c_int64(size))

    def used(self) -> int:
        """Bytes of device memory that are allocated, in pages of 2 MiB, without those that are held."""
        return self.library.rehearsal_used()

    @contextmanager
    def on_host_wait(self, told: Callable[[int], None]) -> Iterator[None]:
        """Call a function at each wait of the host for the device that is recorded, in the thread that waits and with the GIL.

        Args:
            told: its argument is the number of the entry since the process began. It must not use the device. It is not called for waits of
                the caching allocator, which is locked then.
        """
        self._callback = WaitCallback(told)
        self.library.rehearsal_on_host_wait(self._callback)
        try:
            yield
        finally:
            self.library.rehearsal_on_host_wait(None)


def site(frame: FrameType | None = None) -> str:
    """The innermost line of this package's code in a stack, "training/loop.py:101"; "" if there is none.

    Args:
        frame: where to begin; default: the caller.
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents and path.parent != Path(__file__).parent:
            return f"{path.relative_to(PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def demangled(name: str) -> str:
    """The C++ name of a symbol; the symbol itself if it is not one of C++."""
    if not name.startswith("_Z"):
        return name
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = demangle(name.encode(), None, None, ctypes.byref(status))
    if not text:
        return name
    readable = ctypes.string_at(text).decode()
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(text)
    return readable
