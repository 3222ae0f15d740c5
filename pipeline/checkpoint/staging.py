"""Copies of what a rank saves, in memory that it shares with the writer process, made beside the forward and backward passes.

Weights, master weights and moments do not change between two optimizer steps. A snapshot therefore only begins a copy: a thread, on GPUs
with a stream of its own, copies into the segments while the next step computes its gradients, and the trainer waits for it before the
optimizer updates anything. The segments are allocated once: one for each dtype, pinned on GPUs.

That nothing changes is verified. The thread sums the words of the live tensors before it copies (word_sum; the writer compares the bytes
that it writes), and no tensor may have another version, which PyTorch counts with every change in place, when the copy has been made.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint.handover import SharedPlace
from pipeline.checkpoint.parts import ITEM_SIZE, Part
from pipeline.checkpoint.staged_file import word_sum
from pipeline.layers.nf4 import NF4Weight

#: Bytes at whose multiples a part begins in its segment.
_ALIGNMENT = 64
#: Seconds that the thread of a snapshot is waited for at the end; it waits for a GPU, which may hang.
_END = 10.0
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


@dataclass(frozen=True)
class LiveSource:
    """A part that this rank saves, and where its elements are now.

    Attributes:
        tensors: kind -> flat tensor that contains the elements.
        first: the first of them.
    """

    part: Part
    tensors: dict[str, Tensor | NF4Weight]
    first: int

    def live(self, kind: str) -> Tensor:
        """The elements, as a view; the values of a weight in 4 bits."""
        return self.tensors[kind].detach().view(-1)[self.first : self.first + self.part.count]

    def version(self, kind: str) -> int:
        """A number that grows with every change in place; 0 for a weight in 4 bits, which is frozen."""
        tensor = self.tensors[kind]
        return tensor._version if isinstance(tensor, Tensor) else 0


class Segment:
    """Memory that other processes map by its file descriptor.

    Args:
        name: for /proc.
        size: bytes.
        pinned: whether a GPU copies into it.

    Raises:
        OSError: there is not enough memory, or a limit forbids it.
    """

    def __init__(self, name: str, size: int, *, pinned: bool) -> None:
        self.file = os.memfd_create(name, os.MFD_CLOEXEC)
        self.size, self._pinned = max(size, mmap.PAGESIZE), False
        try:
            os.ftruncate(self.file, self.size)
            self.tensor = torch.frombuffer(mmap.mmap(self.file, self.size), dtype=torch.uint8)
            if pinned and (error := int(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.size, 0))):
                raise OSError(f"{self.size / 1e9:.1f} GB of memory cannot be pinned: CUDA error {error}")
            self._pinned = pinned
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Release the memory, as far as no other process maps it; no copy is in progress."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        if self.file >= 0:
            os.close(self.file)
        self.file, self._pinned = -1, False


class Staging:
    """The segments of a rank, and the copy into them. One snapshot at a time.

    Attributes:
        segments: one for each dtype.
        places: kind -> place in the segments, for each part.

    Raises:
        OSError: there is not enough memory.
    """

    def __init__(self, parts: Sequence[Part], device: torch.device) -> None:
        self._device = device
        dtypes = sorted({dtype for part in parts for dtype in part.dtypes.values()})
        sizes = [0] * len(dtypes)
        self.places: list[dict[str, SharedPlace]] = []
        for part in parts:
            self.places.append(places := {})
            for kind, dtype in part.dtypes.items():
                segment = dtypes.index(dtype)
                places[kind] = SharedPlace(segment, sizes[segment], part.bytes(kind))
                sizes[segment] += -(-part.bytes(kind) // _ALIGNMENT) * _ALIGNMENT
        self.segments = [
            Segment(f"checkpoint {dtype}", size, pinned=device.type == "cuda") for dtype, size in zip(dtypes, sizes, strict=True)
        ]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread: threading.Thread | None = None

    def begin(self, sources: Sequence[LiveSource], then: Callable[[Snapshot], None]) -> Snapshot:
        """Begin a snapshot, and return at once.

        Args:
            sources: what this rank saves now, the same parts as before.
            then: called in the thread when the copy has been made and the snapshot released.
        """
        if self._thread is not None:
            self._thread.join()  # it has handed over, and ends
        started = None
        if self._stream is not None:
            started = torch.cuda.Event()
            started.record()
        snapshot = Snapshot(sources, started)
        self._thread = threading.Thread(target=self._run, args=(snapshot, then), name="snapshot", daemon=True)
        self._thread.start()
        return snapshot

    def close(self) -> None:
        """Wait until the snapshot, which has been released, is handed over, and release the segments."""
        if self._thread is not None:
            self._thread.join(_END)
        if self._thread is None or not self._thread.is_alive():
            for segment in self.segments:
                segment.close()

    def _run(self, snapshot: Snapshot, then: Callable[[Snapshot], None]) -> None:
        """Copy, and hand over. The thread of a snapshot."""
        try:
            with torch.no_grad(), nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                if self._stream is not None and snapshot.started is not None:
                    self._stream.wait_event(snapshot.started)  # the work that was queued before the snapshot
                snapshot.summed = self._sum(snapshot.sources)
                self._copy(snapshot)
        except Exception as error:
            snapshot.problem = f"the copy failed: {error}"
        snapshot.queued.set()
        if snapshot.copied is not None:
            snapshot.copied.synchronize()
        snapshot.released.wait()
        then(snapshot)

    def _sum(self, sources: Sequence[LiveSource]) -> list[int] | Tensor:
        """word_sum of each live part and kind, one after the other; on GPUs as a tensor in pinned memory, which is filled later."""
        words = [(source.live(kind), ITEM_SIZE[dtype]) for source in sources for kind, dtype in source.part.dtypes.items()]
        if self._stream is None:
            return [word_sum(_bytes(live), size) for live, size in words]
        # What is in host memory (parallel.offload) is summed there.
        part_sums = [live.view(_WORDS[size]).sum(dtype=torch.int32).to(self._device, non_blocking=True) for live, size in words]
        sums = torch.stack(part_sums) if part_sums else torch.zeros(0, dtype=torch.int32)
        return sums.to("cpu", non_blocking=True)

    def _copy(self, snapshot: Snapshot) -> None:
        for source, places in zip(snapshot.sources, self.places, strict=True):
            for kind, place in places.items():
                copy(source.live(kind), self.segments[place.segment].tensor[place.offset : place.offset + place.bytes])
        if self._stream is not None:
            snapshot.copied = torch.cuda.Event()
            snapshot.copied.record()


def copy(live: Tensor, target: Tensor) -> None:
    """Copy a flat tensor into bytes of host memory; from a GPU without waiting for it."""
    if live.is_cuda:
        target.copy_(live.view(torch.uint8), non_blocking=True)
    else:  # in this thread: PyTorch would use all cores, which the step needs
        np.copyto(target.numpy(), _bytes(live))


class Snapshot:
    """A copy in progress.

    Attributes:
        started: on GPUs, the work before the snapshot.
        queued: set when the copy has been made or, on GPUs, is queued.
        copied: on GPUs, the end of the copy.
        released: set when the copy may be handed over.
        problem: why the copy is useless, empty if it is not.
        summed: word_sum of each live part and kind, one after the other.
    """

    def __init__(self, sources: Sequence[LiveSource], started: torch.cuda.Event | None) -> None:
        self.sources, self.started = sources, started
        self.queued, self.released = threading.Event(), threading.Event()
        self.copied: torch.cuda.Event | None = None
        self.problem = ""
        self.summed: list[int] | Tensor = []
        self._versions = self._current_versions()

    def wait(self) -> None:
        """Wait until the live tensors may change: on a GPU its current stream waits, otherwise this thread."""
        self.queued.wait()
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)
        if not self.problem and (changed := self._changed()):
            self.problem = f"{changed} changed between the beginning of the save and the end of its copy"

    def sums(self) -> list[dict[str, int]]:
        """word_sum of each live part and kind; after the copy."""
        values = self.summed.tolist() if isinstance(self.summed, Tensor) else self.summed
        sums = iter(values)
        return [{kind: next(sums) & 0xFFFFFFFF for kind in source.part.dtypes} for source in self.sources]

    def _current_versions(self) -> list[int]:
        return [source.version(kind) for source in self.sources for kind in source.part.dtypes]

    def _changed(self) -> str:
        """The name of a weight that has changed in place since the snapshot; empty without one."""
        kinds = [(source.part.name, kind) for source in self.sources for kind in source.part.dtypes]
        both = zip(kinds, self._versions, self._current_versions(), strict=True)
        return next((f"{kind} of {name}" for (name, kind), before, now in both if before != now), "")


def staged_bytes(parts: Sequence[Part]) -> int:
    """Bytes of host memory that the copies of these parts need."""
    return sum(part.bytes(kind) for part in parts for kind in part.dtypes)


def _bytes(live: Tensor) -> np.ndarray:
    """The bytes of a flat CPU tensor, without a copy."""
    return live.view(torch.uint8).numpy()
