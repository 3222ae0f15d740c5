"""Finds accesses to device memory whose order nothing ensures, by the happens-before relation of streams, events and waits of the host.

Every stream counts its work. A clock says, for each stream, up to which of its work has ended before something begins: work of a stream
begins after the work before it, after the events that the stream waited for, and after everything that the host had waited for when it
queued it. Two accesses to the same memory, one of which writes, must be ordered. The caching allocator hands out freed memory for work of
the same stream at once: what other streams still do with it must have ended for that stream, or be known to it by `Tensor.record_stream`.

The clocks know no time: a race is found however late the step would have lost it. Imports no torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.rehearsal.memory_map import Last, MemoryMap
from pipeline.rehearsal.record import Access, Allocate, Entry, EventRecord, Free, HostWait, RecordStream, StreamWait, Work

RaceKind = Literal["read before its write", "written while read", "written twice", "freed while used", "reused while used", "never written"]
#: What each kind means, and what is missing.
FIXES: dict[RaceKind, str] = {
    "read before its write": "the reading stream must wait for the writing one",
    "written while read": "the writing stream must wait for the reading one",
    "written twice": "the second stream must wait for the first one",
    "freed while used": "wait for the other stream before the tensor is dropped, or call record_stream",
    "reused while used": "wait for the other stream before the tensor is dropped, or call record_stream",
    "never written": "what writes the memory must be queued before what reads it",
}


@dataclass(frozen=True)
class Race:
    """Two accesses in an order that nothing ensures.

    Attributes:
        kind: what can go wrong.
        first, second: (operator, line of code) of both, in the order of the host.
        streams: of both.
        freed: line of code that freed the memory between them; "" if none did.
        size: bytes that both access, at most.
        count: how often it was found.
    """

    kind: RaceKind
    first: tuple[str, str]
    second: tuple[str, str]
    streams: tuple[int, int]
    freed: str
    size: int
    count: int

    def __str__(self) -> str:
        (name, site), (other, other_site) = self.first, self.second
        freed = f", freed at {self.freed or '?'}" if self.kind in ("freed while used", "reused while used") else ""
        before = f"{name} at {site or '?'} (stream {self.streams[0]:#x}){freed}"
        after = f"{other} at {other_site or '?'} (stream {self.streams[1]:#x})"
        return f"{self.kind}: {before}, then {after}; {self.size:,} bytes, {self.count} x: {FIXES[self.kind]}"


def races(entries: Sequence[Entry]) -> list[Race]:
    """Return the races of a record, the most frequent first."""
    order = _Order()
    for entry in entries:
        order.issue(entry)
    counts = Counter(key for key, _ in order.races)
    sizes: defaultdict[_Key, int] = defaultdict(int)
    for key, size in order.races:
        sizes[key] = max(sizes[key], size)
    return [Race(*key, size=sizes[key], count=count) for key, count in counts.most_common()]


#: Stream -> number of its last work that has ended.
_Clock = dict[int, int]
#: A race without its size: kind, both accesses, their streams, and where the memory was freed.
_Key = tuple[RaceKind, tuple[str, str], tuple[str, str], tuple[int, int], str]


@dataclass
class _Freed:
    """Memory that was freed while work of other streams was not known to have ended.

    Attributes:
        size: bytes.
        site: that freed it.
        users: the work.
    """

    size: int
    site: str
    users: list[Last]


class _Order:
    """The clocks, and what they say of each access."""

    def __init__(self) -> None:
        self.races: list[tuple[_Key, int]] = []
        self._clocks: defaultdict[int, _Clock] = defaultdict(dict)
        self._events: dict[int, _Clock] = {}
        self._host: _Clock = {}
        self._memory = MemoryMap()
        self._blocks: dict[int, Allocate] = {}
        self._recorded: defaultdict[int, set[int]] = defaultdict(set)
        self._freed: defaultdict[int, list[_Freed]] = defaultdict(list)  # by the stream for whose work the allocator hands it out

    def issue(self, entry: Entry) -> None:
        """The host issues the next entry."""
        match entry:
            case Work():
                self._work(entry)
            case EventRecord():
                self._events[entry.event] = _joined(self._clocks[entry.stream], self._host)
            case StreamWait():
                _join(self._clocks[entry.stream], self._events.get(entry.event, {}))
            case HostWait():
                self._wait(entry)
            case Allocate():
                self._allocate(entry)
            case RecordStream():
                self._recorded[entry.address].add(entry.stream)
            case Free():
                self._free(entry)

    def _work(self, work: Work) -> None:
        """Check all accesses of some work."""
        clock = self._clocks[work.stream]
        _join(clock, self._host)
        clock[work.stream] = clock.get(work.stream, 0) + 1
        last = Last(work, clock[work.stream])
        for access in work.reads:
            for part in self._memory.parts(access):
                if part.write is not None:
                    self._check(part.write, last, "read before its write", part.freed, access)
                part.reads[work.stream] = last
                if part.is_new:
                    part.early.append(last)
        for access in work.writes:
            for part in self._memory.parts(access):
                if part.write is not None:
                    self._check(part.write, last, "written twice", part.freed, access)
                for read in part.reads.values():
                    if read is not last:
                        self._check(read, last, "written while read", part.freed, access)
                for read in part.early:
                    if read.work is not work:
                        self._add("never written", read, last, "", access.end - access.begin)
            self._memory.written(access, last)

    def _check(self, before: Last, after: Last, kind: RaceKind, freed: str | None, access: Access) -> None:
        """Note a race unless `before` has ended when `after` begins."""
        stream = before.work.stream
        if self._clocks[after.work.stream].get(stream, 0) < before.tick:
            self._add(kind if freed is None else "reused while used", before, after, freed or "", access.end - access.begin)

    def _add(self, kind: RaceKind, before: Last, after: Last, freed: str, size: int) -> None:
        first, second = before.work, after.work
        key = kind, (first.name, first.site), (second.name, second.site), (first.stream, second.stream), freed
        self.races.append((key, size))

    def _wait(self, wait: HostWait) -> None:
        """What is queued later begins after what the host has waited for."""
        if wait.event is not None:
            _join(self._host, self._events.get(wait.event, {}))
        elif wait.stream is not None:
            _join(self._host, self._clocks[wait.stream])
        else:
            for clock in list(self._clocks.values()):
                _join(self._host, clock)

    def _allocate(self, entry: Allocate) -> None:
        """Memory is handed out: other freed memory of the stream could have been."""
        self._blocks[entry.address] = entry
        if not entry.earlier:
            self._memory.handed_out(Access(entry.address, entry.address + entry.size))
        clock = _joined(self._clocks[entry.stream], self._host)
        kept = []
        for freed in self._freed[entry.stream]:
            users = [user for user in freed.users if clock.get(user.work.stream, 0) < user.tick]
            if users and entry.size <= freed.size:
                for user in users:
                    after = Last(Work(entry.time, "kernel", "an allocation", entry.stream, entry.site), 0)
                    self._add("freed while used", user, after, freed.site, freed.size)
            elif users:
                kept.append(_Freed(freed.size, freed.site, users))
        self._freed[entry.stream] = kept

    def _free(self, entry: Free) -> None:
        """Memory goes back: work of other streams that nothing has waited for may still use it."""
        block = self._blocks.pop(entry.address, None)
        recorded = self._recorded.pop(entry.address, set())
        if block is None:
            return
        awaited: _Clock = {}  # the allocator hands it out after the work of these streams, and after what that has waited for
        for stream in recorded:
            _join(awaited, _joined(self._clocks[stream], self._host))
        memory = Access(block.address, block.address + block.size)
        left = self._memory.freed(memory, entry.site, lambda last: last.tick <= awaited.get(last.work.stream, 0))
        clock = _joined(self._clocks[block.stream], self._host)
        users = [last for last in left if clock.get(last.work.stream, 0) < last.tick]
        if users:
            self._freed[block.stream].append(_Freed(block.size, entry.site, users))


def _join(clock: _Clock, other: _Clock) -> None:
    """Raise a clock to another one."""
    for stream, tick in other.items():
        if tick > clock.get(stream, 0):
            clock[stream] = tick


def _joined(clock: _Clock, other: _Clock) -> _Clock:
    """Return the later of two clocks, for each stream."""
    result = dict(clock)
    _join(result, other)
    return result


def report(races: Iterable[Race], at_most: int = 20) -> list[str]:
    """Return races as lines of text."""
    lines = [str(race) for race in races]
    return lines[:at_most] + ([f"... and {len(lines) - at_most} more"] if len(lines) > at_most else [])
