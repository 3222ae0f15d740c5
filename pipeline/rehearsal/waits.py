"""Waits of a replayed step: of the host for the device, and of work for collectives that are queued behind others that are needed later."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.rehearsal.memory_map import Last, MemoryMap
from pipeline.rehearsal.record import STEP, Entry, Work
from pipeline.rehearsal.replay import Replay


@dataclass(frozen=True)
class SiteWait:
    """The waits of the host at a line of code.

    Attributes:
        site: line of code.
        name: for what: device, stream or event.
        count: how often.
        seconds: that the host waited.
    """

    site: str
    name: str
    count: int
    seconds: float


@dataclass(frozen=True)
class LateGather:
    """Collectives that are queued behind others whose results are used later.

    Attributes:
        site: line of code that queued them.
        name, axis: of the collectives.
        user: line of code that used the first of them.
        count: how many.
        behind: most others that one of them was queued behind without need.
        seconds: that those others take, for the one for which that is longest.
    """

    site: str
    name: str
    axis: str
    user: str
    count: int
    behind: int
    seconds: float


def host_waits(replay: Replay) -> list[SiteWait]:
    """Return the waits of the host in the last step by line of code, the longest first."""
    counts: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    first = max((time for name, time, _ in replay.marks if name == STEP), default=0.0)
    for waited in replay.waits:
        if waited.begin < first:
            continue
        counts[waited.wait.site, waited.wait.name].append(waited.end - waited.begin)
    found = [SiteWait(site, name, len(seconds), sum(seconds)) for (site, name), seconds in counts.items()]
    return sorted(found, key=lambda wait: (-wait.seconds, -wait.count))


def late_gathers(entries: Sequence[Entry]) -> list[LateGather]:
    """Return the all-gathers that are queued behind others of their stream whose results are used later, the longest first.

    A stream runs its work in order: what waits for a gather waits for all that were queued before it.
    """
    uses = _first_uses(entries)
    streams: defaultdict[int, list[tuple[int, Work]]] = defaultdict(list)
    for number, entry in enumerate(entries):
        if isinstance(entry, Work) and entry.kind == "collective" and entry.name == "all_gather" and number in uses:
            streams[entry.stream].append((number, entry))
    found: defaultdict[tuple[str, str, str], list[tuple[int, float, str]]] = defaultdict(list)
    for queued in streams.values():
        for place, (number, work) in enumerate(queued):
            use, user = uses[number]
            # Those that were queued before it, after it could have been queued instead, and that nothing has needed yet.
            ahead = [other for earlier, other in queued[:place] if uses[earlier][0] > use]
            if ahead:
                found[work.site, work.name, work.axis].append((len(ahead), sum(other.seconds for other in ahead), user))
    late = [
        LateGather(*key, user=some[0][2], count=len(some), behind=max(n for n, _, _ in some), seconds=max(s for _, s, _ in some))
        for key, some in found.items()
    ]
    return sorted(late, key=lambda gather: -gather.seconds)


def _first_uses(entries: Sequence[Entry]) -> dict[int, tuple[int, str]]:
    """Index of each all-gather -> index and line of code of the first work that reads its result; without those that nothing reads."""
    memory, uses = MemoryMap(), dict[int, tuple[int, str]]()
    for number, entry in enumerate(entries):
        if not isinstance(entry, Work):
            continue
        for access in entry.reads:
            for part in memory.parts(access):
                if part.write is not None:
                    uses.setdefault(part.write.tick, (number, entry.site))
        for access in entry.writes:
            if entry.kind == "collective" and entry.name == "all_gather":
                memory.written(access, Last(entry, number))
            else:
                for part in memory.parts(access):
                    part.write = None
    return uses
