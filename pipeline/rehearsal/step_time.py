"""What a replayed step spends its time on: computation, communication by axis, exposed communication, and waits of the device."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from pipeline.common.intervals import Interval, common, length, union, without
from pipeline.rehearsal.record import STEP
from pipeline.rehearsal.replay import Placed, Replay

#: Kinds of work that use the multiprocessors for the model.
COMPUTE = ("kernel", "product", "attention", "fill")


@dataclass
class StepTime:
    """Times of a step, seconds; the sum of `compute`, `exposed`, `host` and `other` is `step`.

    Attributes:
        window: begin and end of the step in the replay.
        step: seconds between them.
        compute: in which any stream computes.
        communication: axis -> in which collectives over it run.
        exposed_axes: axis -> in which nothing computes because work waits for a stream while a collective over it runs. Collectives over
            several axes at once count for each.
        exposed: likewise, of any axis.
        host: in which nothing computes because the host has not queued the next work.
        host_sites: line of code -> its part of `host`: that of the wait of the host since which it is behind, or else of the late work.
        other: in which nothing computes for another reason, such as a copy.
        exposed_intervals, host_intervals: when.
    """

    window: Interval
    step: float
    compute: float
    communication: dict[str, float]
    exposed_axes: dict[str, float]
    exposed: float
    host: float
    host_sites: dict[str, float]
    other: float
    exposed_intervals: list[Interval] = field(default_factory=list)
    host_intervals: list[Interval] = field(default_factory=list)


def step_time(replay: Replay) -> StepTime:
    """Return what the last whole step of a replay spends its time on.

    If the record has several steps, the last one lasts from the end of the computation of the one before to that of its own: what a step
    leaves to run beside the next one, such as the gathering of new weights, then counts where it is waited for.
    """
    window = step_window(replay)
    computing = [placed for placed in replay.work if placed.work.kind in COMPUTE]
    axes: defaultdict[str, list[Interval]] = defaultdict(list)
    for placed in replay.work:
        if placed.work.kind == "collective":
            axes[placed.work.axis].append((placed.begin, placed.end))
    whole = [window] if window[1] > window[0] else []
    communication = {axis: common(whole, union(intervals)) for axis, intervals in sorted(axes.items())}
    busy = common(whole, union((placed.begin, placed.end) for placed in computing if placed.end > placed.begin))
    gaps = without(whole, busy)
    idle = without(whole, union((placed.begin, placed.end) for placed in replay.work if placed.end > placed.begin))
    late = _late_host(gaps, computing)
    # A device that runs nothing at all has finished everything that was queued.
    late += _before(without(idle, union(interval for interval, _ in late)), replay.work)
    late.sort(key=lambda pair: pair[0])
    behind = union(interval for interval, _ in late)
    waiting = without(gaps, behind)
    exposed = common(waiting, union(interval for intervals in axes.values() for interval in intervals))
    return StepTime(
        window=window,
        step=window[1] - window[0],
        compute=length(busy),
        communication={axis: length(intervals) for axis, intervals in communication.items()},
        exposed_axes={axis: length(common(waiting, intervals)) for axis, intervals in communication.items()},
        exposed=length(exposed),
        host=length(behind),
        host_sites=_by_site(late, replay),
        other=length(without(waiting, exposed)),
        exposed_intervals=exposed,
        host_intervals=behind,
    )


def step_window(replay: Replay) -> Interval:
    """Return begin and end of the last step: of the whole replay if it has no marks of several steps."""
    begins = [number for name, _, number in replay.marks if name == STEP]
    if len(begins) < 2:
        return 0.0, replay.seconds
    ends = [
        max((placed.end for placed in replay.work[first:last] if placed.work.kind in COMPUTE), default=0.0)
        for first, last in ((begins[-2], begins[-1]), (begins[-1], len(replay.work)))
    ]
    return ends[0], max(ends)


def _late_host(gaps: list[Interval], computing: list[Placed]) -> list[tuple[Interval, Placed]]:
    """The part of each gap in which the next work could have run, had the host queued it; with that work."""
    following = _before(gaps, computing)
    parts = [((max(begin, placed.ready), end), placed) for (begin, end), placed in following]
    return [(interval, placed) for interval, placed in parts if interval[0] < interval[1]]


def _before(gaps: list[Interval], work: list[Placed]) -> list[tuple[Interval, Placed]]:
    """Each gap with the work that begins at its end; without those at whose end none does."""
    pairs = []
    following = iter(sorted((placed for placed in work if placed.end > placed.begin), key=lambda placed: placed.begin))
    placed = next(following, None)
    for begin, end in gaps:
        while placed is not None and placed.begin < end:
            placed = next(following, None)
        if placed is not None:
            pairs.append(((begin, end), placed))
    return pairs


def _by_site(late: list[tuple[Interval, Placed]], replay: Replay) -> dict[str, float]:
    """Seconds by line of code: the device waits after a wait of the host that ended in the gap or at its begin, else for the late work."""
    sites: defaultdict[str, float] = defaultdict(float)
    waits = [wait for wait in replay.waits if wait.end > wait.begin]
    place, last = 0, None
    for (begin, end), placed in late:
        while place < len(waits) and waits[place].end <= end:
            last = waits[place]
            place += 1
        after_wait = last is not None and last.end >= begin
        sites[last.wait.site if after_wait and last is not None else placed.work.site] += end - begin
    return dict(sorted(sites.items(), key=lambda item: -item[1]))
