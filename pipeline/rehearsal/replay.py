"""Replays a recorded step with two clocks: the host issues entries at its own times, and every stream of the device runs its work in order.

Work begins when its stream has finished the work before it, when the events that its stream waits for have completed, and when the host
has queued it. A host wait stops the host's clock until the device has reached the event. Streams run beside each other at full speed: what
kernels lose by sharing the multiprocessors and the memory is not modeled. The other ranks are never late: of a collective the time is
that of its bytes, and of a receive from another pipeline stage that of the transfer. Imports no torch.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.rehearsal.record import Allocate, Entry, EventRecord, Free, HostWait, Mark, RecordStream, StreamWait, Work

#: Launches of a stream that the CUDA driver queues; the host blocks in the next one.
QUEUE = 1024


@dataclass(frozen=True, slots=True)
class Placed:
    """Work with its times, seconds since the begin of the replay.

    Attributes:
        work: what ran.
        queued: when the host queued it.
        ready: when the work before it and the events that its stream waits for were completed.
        begin, end: of the work on the device.
    """

    work: Work
    queued: float
    ready: float
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Waited:
    """A wait of the host, from `begin` up to `end`."""

    wait: HostWait
    begin: float
    end: float


@dataclass
class Memory:
    """Memory of tensors over the step, bytes.

    Attributes:
        allocated: at most, as the host sees it.
        held: at most, freed on the host while the device has not finished what `Tensor.record_stream` waits for.
        peak: of the sum of both.
        sites: held bytes at the time of `peak`, by the line of code that freed them.
    """

    allocated: int = 0
    held: int = 0
    peak: int = 0
    sites: dict[str, int] = field(default_factory=dict)


@dataclass
class Replay:
    """A step in time.

    Attributes:
        work: in the order in which the host queued it.
        waits: of the host.
        marks: (name, time of the host, number of work that was queued before) of the parts of the record.
        memory: of tensors.
        host_end: when the host had issued everything.
        blocked: seconds in which the host could not queue work because the driver's queue was full.
    """

    work: list[Placed] = field(default_factory=list)
    waits: list[Waited] = field(default_factory=list)
    marks: list[tuple[str, float, int]] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    host_end: float = 0.0
    blocked: float = 0.0

    @property
    def seconds(self) -> float:
        """From the begin of the replay until the host and the device are finished."""
        return max([self.host_end, *(placed.end for placed in self.work)])


def replay(entries: Sequence[Entry], *, host: float = 1.0, queue: int = QUEUE) -> Replay:
    """Return a recorded step in time.

    Args:
        entries: of one rank, in the order of the host.
        host: factor of the time that the host takes between two entries; 0 for a host that is infinitely fast.
        queue: launches of a stream that may be queued.
    """
    clocks = _Clocks(host, queue)
    for entry in entries:
        clocks.issue(entry)
    clocks.result.host_end = clocks.now
    return clocks.result


class _Clocks:
    """The clocks of the host and of the streams."""

    def __init__(self, host: float, queue: int) -> None:
        self.result, self.now = Replay(), 0.0
        self._factor, self._queue = host, queue
        self._time: float | None = None
        self._free: defaultdict[int, float] = defaultdict(float)
        self._ends: defaultdict[int, list[float]] = defaultdict(list)
        self._events: dict[int, float] = {}
        self._memory = _MemoryOverTime(self.result.memory)

    def issue(self, entry: Entry) -> None:
        """The host issues the next entry."""
        self.now += self._factor * (entry.time - (entry.time if self._time is None else self._time))
        self._time = entry.time
        match entry:
            case Work():
                self._launch(entry)
            case EventRecord():
                self._events[entry.event] = self._free[entry.stream]
            case StreamWait():
                self._free[entry.stream] = max(self._free[entry.stream], self._events.get(entry.event, 0.0))
            case HostWait():
                self._wait(entry)
            case Allocate():
                self._memory.allocate(entry, self.now)
            case RecordStream():
                self._memory.streams[entry.address].add(entry.stream)
            case Free():
                self._memory.free(entry, self.now, self._free)
            case Mark():
                self.result.marks.append((entry.name, self.now, len(self.result.work)))

    def _launch(self, work: Work) -> None:
        """Queue work; the host blocks while the queue of the stream is full."""
        ends = self._ends[work.stream]
        if len(ends) >= self._queue and ends[-self._queue] > self.now:
            self.result.blocked += ends[-self._queue] - self.now
            self.now = ends[-self._queue]
        ready = self._free[work.stream]
        begin = max(ready, self.now)
        end = begin + work.seconds
        self._free[work.stream] = end
        ends.append(end)
        self.result.work.append(Placed(work, self.now, ready, begin, end))

    def _wait(self, wait: HostWait) -> None:
        """Stop the host until an event, a stream or the device is completed."""
        if wait.event is not None:
            until = self._events.get(wait.event, 0.0)
        elif wait.stream is not None:
            until = self._free[wait.stream]
        else:
            until = max(self._free.values(), default=0.0)
        self.result.waits.append(Waited(wait, self.now, max(self.now, until)))
        self.now = max(self.now, until)


class _MemoryOverTime:
    """Memory of tensors while the host issues entries."""

    def __init__(self, result: Memory) -> None:
        self.streams: defaultdict[int, set[int]] = defaultdict(set)
        self._result = result
        self._sizes: dict[int, int] = {}
        self._allocated = self._held = 0
        self._late: list[tuple[float, int, str]] = []

    def allocate(self, entry: Allocate, now: float) -> None:
        """Add memory."""
        self._take_back(now)
        self._sizes[entry.address] = entry.size
        self._allocated += entry.size
        result = self._result
        result.allocated = max(result.allocated, self._allocated)
        if self._allocated + self._held > result.peak:
            result.peak = self._allocated + self._held
            sites: Counter[str] = Counter()
            for _, size, site in self._late:
                sites[site] += size
            result.sites = dict(sites.most_common())

    def free(self, entry: Free, now: float, completed: dict[int, float]) -> None:
        """Hold memory until the streams that use it have completed what is queued there."""
        self._take_back(now)
        size = self._sizes.pop(entry.address, 0)
        self._allocated -= size
        until = max((completed[stream] for stream in self.streams.pop(entry.address, ())), default=0.0)
        if until > now:
            heapq.heappush(self._late, (until, size, entry.site))
            self._held += size
            self._result.held = max(self._result.held, self._held)

    def _take_back(self, now: float) -> None:
        """Release what the device has finished with."""
        while self._late and self._late[0][0] <= now:
            self._held -= heapq.heappop(self._late)[1]
