"""Which work has read and written each part of the device's memory last. Imports no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeline.rehearsal.record import Access, Work


@dataclass(frozen=True, slots=True, eq=False)
class Last:
    """Work, and its number on its stream, from 1 on."""

    work: Work
    tick: int


@dataclass(slots=True)
class MemoryRange:
    """Memory from `begin` up to `end` that had the same accesses.

    Attributes:
        begin, end: addresses.
        write: the last one.
        reads: stream -> its last read since then.
        freed: line of code that freed the memory since `write` and `reads`; None if nothing did.
        is_new: whether it was handed out and not written since.
        early: reads while it was new.
    """

    begin: int
    end: int
    write: Last | None = None
    reads: dict[int, Last] = field(default_factory=dict)
    freed: str | None = None
    is_new: bool = False
    early: list[Last] = field(default_factory=list)


class MemoryMap:
    """Parts of the memory, by address; what was never accessed has none."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._parts: list[MemoryRange] = []

    def parts(self, access: Access) -> list[MemoryRange]:
        """Return the parts of some memory, which they cover exactly; parts are split and added for it."""
        first, last = self._split(access.begin), self._split(access.end)
        position, place = access.begin, first
        while position < access.end:
            if place < last and self._begins[place] == position:
                position = self._parts[place].end
            else:
                end = min(access.end, self._begins[place]) if place < last else access.end
                self._begins.insert(place, position)
                self._parts.insert(place, MemoryRange(position, end))
                position, last = end, last + 1
            place += 1
        return self._parts[first:last]

    def written(self, access: Access, last: Last) -> None:
        """Some work has written all of some memory: it becomes one part."""
        first, end = self._split(access.begin), self._split(access.end)
        self._begins[first:end] = [access.begin]
        self._parts[first:end] = [MemoryRange(access.begin, access.end, last)]

    def handed_out(self, access: Access) -> None:
        """The allocator hands out memory: its values are undefined."""
        for part in self.parts(access):
            part.is_new, part.early = True, []

    def freed(self, access: Access, site: str, has_ended: Callable[[Last], bool]) -> set[Last]:
        """Memory goes back to the allocator. Return the last accesses, without those that have ended when it is handed out again."""
        users = set()
        for part in self.parts(access):
            part.freed, part.is_new, part.early = site, False, []
            if part.write is not None and has_ended(part.write):
                part.write = None
            part.reads = {stream: read for stream, read in part.reads.items() if not has_ended(read)}
            users |= {*part.reads.values(), *([part.write] if part.write is not None else [])}
        return users

    def _split(self, address: int) -> int:
        """Return the index of the first part that begins at an address or after it; a part around it is split."""
        place = bisect_right(self._begins, address) - 1
        if place >= 0 and self._begins[place] < address < self._parts[place].end:
            part = self._parts[place]
            rest = MemoryRange(address, part.end, part.write, dict(part.reads), part.freed, part.is_new, list(part.early))
            part.end = address
            self._begins.insert(place + 1, address)
            self._parts.insert(place + 1, rest)
        return bisect_left(self._begins, address)
