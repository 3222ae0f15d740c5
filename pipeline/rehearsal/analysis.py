"""What the record of a step says: times of host and device, communication, waits, races and memory that streams hold. Imports no torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.config.hardware import Hardware
from pipeline.parallel.mesh import Mesh
from pipeline.rehearsal import races as race_report
from pipeline.rehearsal.memory_map import Last, MemoryMap
from pipeline.rehearsal.races import Race, races
from pipeline.rehearsal.record import STEP, Entry, Mark, Work
from pipeline.rehearsal.replay import Memory, Replay, replay
from pipeline.rehearsal.step_time import StepTime, step_time

#: Lines of code that are printed: of an idle device, and of the most launches.
_SITES = 5


@dataclass
class Findings:
    """What is known of a recorded step.

    Attributes:
        replay: of the whole record with the host's times of this machine.
        time: what that step spends its time on.
        fast: likewise, with a host that is infinitely fast.
        memory: of the record with the infinitely fast host, which runs as far ahead of the device as it can.
        waits: of the host.
        late_gathers: collectives behind others that are needed later.
        races: accesses without an order.
        collectives: of the last step, (axis, name) -> number, bytes and seconds.
        launches: line of code -> kernels of the last step, most first.
        pipelined: whether other pipeline stages exist, for which this one may wait.
    """

    hardware: Hardware
    replay: Replay
    time: StepTime
    fast: StepTime
    memory: Memory
    waits: list[SiteWait]
    late_gathers: list[LateGather]
    races: list[Race]
    collectives: dict[tuple[str, str], tuple[int, int, float]]
    launches: dict[str, int]
    pipelined: bool

    def lines(self) -> Iterator[str]:
        """Yield the printed report."""
        yield from self._time_lines()
        for wait in self.waits:
            yield f"  host waits for the device: {wait.count} x {wait.site or '?'} ({wait.name}), {1e3 * wait.seconds:.2f} ms"
        for site, count in list(self.launches.items())[:_SITES]:
            yield f"  launches at {site or '?'}: {count:,}"
        yield f"memory that record_stream holds: at most {self.memory.held / 1e9:.2f} GB if the host runs ahead{self._held_text()}"
        for gather in self.late_gathers:
            where = f"{gather.count} x {gather.name} ({gather.axis}) at {gather.site or '?'}, used at {gather.user or '?'}"
            behind = f"queued behind up to {gather.behind} that are needed later ({1e3 * gather.seconds:.2f} ms)"
            yield f"order of collectives: {where}, {behind}"
        yield f"races: {len(self.races) or 'none'}"
        yield from (f"  {line}" for line in race_report.report(self.races))

    def content(self) -> dict[str, Any]:
        """Return what rehearsal.json has of it; times in seconds, memory in bytes."""
        times = {name: {**asdict(time)} for name, time in (("this_host", self.time), ("infinitely_fast_host", self.fast))}
        for time in times.values():
            del time["exposed_intervals"], time["host_intervals"]
        return {
            "times": times,
            "queue_full_seconds": self.replay.blocked,
            "collectives": [
                {"axis": axis, "name": name, "count": count, "bytes": size, "seconds": seconds}
                for (axis, name), (count, size, seconds) in self.collectives.items()
            ],
            "host_waits": [asdict(wait) for wait in self.waits],
            "launches": self.launches,
            "run_ahead_memory": asdict(self.memory),
            "late_gathers": [asdict(gather) for gather in self.late_gathers],
            "races": [asdict(race) for race in self.races],
            "unknown": self._unknown(),
        }

    def _time_lines(self) -> Iterator[str]:
        """Times of the step."""
        time, fast = self.time, self.fast
        parts = f"computes {_ms(time.compute, time.step)}, exposed communication {_ms(time.exposed, time.step)}"
        yield f"replay on {self.hardware.name}: step {1e3 * time.step:.1f} ms, {parts}, waits for the host {_ms(time.host, time.step)}"
        yield f"  with an infinitely fast host: step {1e3 * fast.step:.1f} ms, exposed communication {_ms(fast.exposed, fast.step)}"
        yield f"  not known: {'; '.join(self._unknown())}"
        for axis, seconds in time.communication.items():
            yield f"  {axis:<16}collectives run {1e3 * seconds:9.2f} ms, exposed {1e3 * time.exposed_axes[axis]:9.2f} ms"
        for site, seconds in list(time.host_sites.items())[:_SITES]:
            yield f"  the device waits for the host at {site or '?'}: {1e3 * seconds:.2f} ms"

    def _held_text(self) -> str:
        """How much more memory is asked for because of it, and where it was freed."""
        more = self.memory.peak - self.memory.allocated
        sites = ", ".join(f"{size / 1e9:.2f} GB at {site or '?'}" for site, size in list(self.memory.sites.items())[:3])
        return f"; the peak grows by {more / 1e9:.2f} GB ({sites})" if more > 0 else "; the peak does not grow"

    def _unknown(self) -> list[str]:
        """What a replay of one rank cannot know."""
        reasons = ["waits for slower ranks", "kernels that slow each other down"]
        return ["waits for other pipeline stages (the bubble)", *reasons] if self.pipelined else reasons


def analyze(entries: Sequence[Entry], hardware: Hardware, host_seconds: float | None = None) -> Findings:
    """Return what the record of one or several steps says; times are those of the last step, the rest is of all.

    Args:
        entries: of one rank, in the order of the host, with a Mark STEP at the begin of each step.
        hardware: the GPU for which the work has its times.
        host_seconds: of the host in all recorded steps together while nothing is recorded; recording slows the host down. None to take the
            times of the record.
    """
    recorded = entries[-1].time - entries[0].time if entries else 0.0
    as_recorded = replay(entries, host=1.0 if host_seconds is None or not recorded else host_seconds / recorded)
    unbounded = replay(entries, host=0.0)
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    seconds: dict[tuple[str, str], float] = {}
    last = max((number for number, entry in enumerate(entries) if isinstance(entry, Mark) and entry.name == STEP), default=0)
    queued = [entry for entry in entries[last:] if isinstance(entry, Work)]
    launches: Counter[str] = Counter()
    for entry in queued:
        launches[entry.site] += entry.launches
    work = [entry for entry in queued if entry.kind == "collective"]
    for entry in work:
        key = entry.axis, entry.name
        counts[key] += 1
        sizes[key] += entry.size
        seconds[key] = seconds.get(key, 0.0) + entry.seconds
    return Findings(
        hardware,
        as_recorded,
        step_time(as_recorded),
        step_time(unbounded),
        unbounded.memory,
        host_waits(as_recorded),
        late_gathers(entries),
        races(entries),
        {key: (counts[key], sizes[key], seconds[key]) for key in counts},
        dict(launches.most_common()),
        any(entry.axis == "pipeline" for entry in work),
    )


def _ms(seconds: float, whole: float) -> str:
    """Milliseconds and their share."""
    return f"{1e3 * seconds:.1f} ms ({seconds / whole:.1%})" if whole else f"{1e3 * seconds:.1f} ms"


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
    waits = [SiteWait(site, name, len(seconds), sum(seconds)) for (site, name), seconds in counts.items()]
    return sorted(waits, key=lambda wait: (-wait.seconds, -wait.count))


def late_gathers(entries: Sequence[Entry]) -> list[LateGather]:
    """Return the all-gathers that are queued behind others of their stream whose results are used later, the longest first.

    A stream runs its work in order: what waits for a gather waits for all that were queued before it.
    """
    uses = _first_uses(entries)
    streams: defaultdict[int, list[tuple[int, Work]]] = defaultdict(list)
    for number, entry in enumerate(entries):
        if isinstance(entry, Work) and entry.kind == "collective" and entry.name == "all_gather" and number in uses:
            streams[entry.stream].append((number, entry))
    by_site: defaultdict[tuple[str, str, str], list[tuple[int, float, str]]] = defaultdict(list)
    for queued in streams.values():
        for place, (number, work) in enumerate(queued):
            use, user = uses[number]
            # Those that were queued before it, after it could have been queued instead, and that nothing has needed yet.
            ahead = [other for earlier, other in queued[:place] if uses[earlier][0] > use]
            if ahead:
                by_site[work.site, work.name, work.axis].append((len(ahead), sum(other.seconds for other in ahead), user))
    late = [
        LateGather(*key, user=some[0][2], count=len(some), behind=max(n for n, _, _ in some), seconds=max(s for _, s, _ in some))
        for key, some in by_site.items()
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


#: Groups of parallel.zero_group -> names: ranks that shard the same weights, and ranks with the same shard; last those of experts.
ZERO = {
    "dense_shards": "ZeRO group",
    "dense_replicas": "ZeRO replicas",
    "data_shards": "expert shards",
    "data_replicas": "expert copies",
}
#: Axes of the mesh, in the order in which one is named for a group that several of them have.
AXES = ("tensor", "context", "expert", "dense", "data", "pipeline", "tied_embedding", "tensor_expert", *ZERO)


def axis_names(mesh: Mesh) -> dict[tuple[int, ...], str]:
    """Return the ranks of each group of the mesh -> the name of its axis; `data` if dense and data have the same ranks."""
    groups = ((name, getattr(mesh, name)) for name in reversed(AXES))
    names = {**ZERO, "tensor_expert": "expert"}
    if mesh.layout.expert == 1:
        names["dense"] = "data"
    return {group.ranks: names.get(name, name) for name, group in groups if group is not None}
