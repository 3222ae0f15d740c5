"""What a rehearsal records of a step, in the order of the host: work on streams, events, waits and allocations. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Name of the mark at the begin of a step.
STEP = "step"
#: What work on a stream is.
WorkKind = Literal["kernel", "product", "attention", "copy", "fill", "collective"]


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes of device memory, from `begin` up to `end`, that some work reads or writes."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Work:
    """An operation, queued on a stream.

    Attributes:
        time: of the host when it was queued, seconds since the begin of the record.
        kind: what it is.
        name: operator of PyTorch, such as "aten::mm", or collective, such as "all_gather".
        stream: on which it runs.
        site: line of code that asked for it, "training/weight_gathering.py:101"; "" if unknown.
        seconds: that it takes on the GPU, as planned.
        launches: kernels that it launched.
        reads, writes: device memory that it uses.
        axis: of the mesh, "" for anything but a collective.
        size: bytes that a collective or copy moves.
    """

    time: float
    kind: WorkKind
    name: str
    stream: int
    site: str
    seconds: float = 0.0
    launches: int = 1
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()
    axis: str = ""
    size: int = 0


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An event is recorded on a stream: it completes with the work that was queued there before."""

    time: float
    event: int
    stream: int
    site: str


@dataclass(frozen=True, slots=True)
class StreamWait:
    """Further work of a stream waits for an event."""

    time: float
    event: int
    stream: int
    site: str


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host waits for an event or a stream, or for the whole device if both are None. A copy to the host waits for its stream."""

    time: float
    name: str
    site: str
    event: int | None = None
    stream: int | None = None


@dataclass(frozen=True, slots=True)
class Allocate:
    """Memory becomes a tensor's, from the caching allocator: no call of the driver, unless new memory was reserved.

    Attributes:
        earlier: whether it happened before the begin of the record; the memory then holds values.
    """

    time: float
    address: int
    size: int
    stream: int
    site: str
    earlier: bool = False


@dataclass(frozen=True, slots=True)
class RecordStream:
    """Tensor.record_stream: freed memory is handed out again only after the work that is queued on the stream by then."""

    time: float
    address: int
    stream: int
    site: str


@dataclass(frozen=True, slots=True)
class Free:
    """Memory goes back to the caching allocator, which may hand it out again for work of the same stream at once."""

    time: float
    address: int
    site: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A part of the record begins: STEP; forward, backward, optimizer, save, validation; or a module of the model."""

    time: float
    name: str


Entry = Work | EventRecord | StreamWait | HostWait | Allocate | RecordStream | Free | Mark
