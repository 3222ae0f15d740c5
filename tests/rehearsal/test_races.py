"""Races in a record: planted ones are found with both lines of code, and random programs are judged as by reachability in a graph."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.rehearsal.races import Race, races, report
from pipeline.rehearsal.record import Access, Allocate, Entry, EventRecord, Free, HostWait, RecordStream, StreamWait, Work

SIZE = 512


def work(stream: int, site: str, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()) -> Work:
    """Work on blocks of memory."""
    memory = [tuple(Access(block * SIZE, (block + 1) * SIZE) for block in blocks) for blocks in (reads, writes)]
    return Work(0, "kernel", "op", stream, site, 1, 1, memory[0], memory[1])


def allocate(block: int, stream: int = 0) -> Allocate:
    return Allocate(0, block * SIZE, SIZE, stream, "make.py:1")


def free(block: int) -> Free:
    return Free(0, block * SIZE, "drop.py:2")


def after(first: int, second: int, event: int = 0) -> list[Entry]:
    """The second stream waits for the first one."""
    return [EventRecord(0, event, first, ""), StreamWait(0, event, second, "")]


def only(entries: list[Entry]) -> Race:
    (found,) = races(entries)
    assert found.first[1] in str(found)
    assert found.second[1] in str(found)
    return found


@pytest.mark.parametrize(
    "first, second, kind",
    [
        ({"writes": (1,)}, {"reads": (1,)}, "read before its write"),
        ({"reads": (1,)}, {"writes": (1,)}, "written while read"),
        ({"writes": (1,)}, {"writes": (1,)}, "written twice"),
    ],
)
def test_a_missing_wait(first: dict[str, tuple[int, ...]], second: dict[str, tuple[int, ...]], kind: str) -> None:
    before, later = work(0, "a.py:1", **first), work(7, "b.py:2", **second)
    found = only([before, later])
    assert (found.kind, found.first, found.second, found.streams, found.size) == (kind, ("op", "a.py:1"), ("op", "b.py:2"), (0, 7), SIZE)
    assert races([before, *after(0, 7), later]) == []
    assert races([*after(0, 7), before, later]) == [found], "a wait for earlier work does not help"
    assert races([before, HostWait(0, "item", "", stream=0), later]) == []
    assert races([before, EventRecord(0, 4, 0, ""), HostWait(0, "item", "", event=4), later]) == []
    assert races([before, HostWait(0, "synchronize", ""), later]) == []
    assert races([before, *after(0, 3, 1), *after(3, 7, 2), later]) == [], "by way of a third stream"
    assert races([before, replace(later, stream=0)]) == []


def test_a_buffer_that_is_freed_while_another_stream_uses_it() -> None:
    use = [allocate(1), work(0, "fill.py:1", writes=(1,)), *after(0, 7), work(7, "send.py:2", reads=(1,)), free(1)]
    reuse = [allocate(1), work(0, "next.py:3", writes=(1,))]
    kinds = {found.kind: found for found in races(use + reuse)}
    assert set(kinds) == {"freed while used", "reused while used"}
    assert kinds["reused while used"].first == ("op", "send.py:2")
    assert kinds["reused while used"].second == ("op", "next.py:3")
    assert kinds["reused while used"].freed == "drop.py:2"
    assert only([*use, allocate(2)]).kind == "freed while used", "the allocator could have handed out the same memory"
    assert races([*use, *after(7, 0, 9), *reuse]) == [], "waited for before anything is allocated"
    assert races([*use, allocate(2, stream=7)]) == [], "another stream does not get the memory"
    waited = [*use, *after(7, 3, 9), allocate(2, stream=3), allocate(4)]
    assert only(waited).kind == "freed while used", "that another stream has waited is no help for this one"
    recorded = [*use[:-1], RecordStream(0, SIZE, 7, ""), use[-1]]
    assert races(recorded + reuse) == []


def test_record_stream_covers_what_the_stream_has_waited_for() -> None:
    """As gradient_reduction does: the collective runs on a stream of its own, which the recorded stream waits for."""
    begin = [allocate(1), work(0, "fill.py:1", writes=(1,)), *after(0, 3, 1), *after(3, 7, 2), work(7, "send.py:2", reads=(1,))]
    end = [RecordStream(0, SIZE, 3, ""), free(1), allocate(1), work(0, "next.py:3", writes=(1,))]
    assert races([*begin, *after(7, 3, 3), *end]) == []
    assert races([*begin, *end]) != []


def test_a_gather_that_is_queued_after_its_use() -> None:
    found = only([allocate(1), work(0, "use.py:1", reads=(1,)), *after(0, 7), work(7, "gather.py:2", writes=(1,)), *after(7, 0)])
    assert (found.kind, found.first, found.second) == ("never written", ("op", "use.py:1"), ("op", "gather.py:2"))
    right = [allocate(1), work(7, "gather.py:2", writes=(1,)), *after(7, 0), work(0, "use.py:1", reads=(1,))]
    assert races([EventRecord(0, 5, 0, ""), StreamWait(0, 5, 7, ""), *right]) == []
    earlier = replace(allocate(1), earlier=True)
    assert races([earlier, work(0, "use.py:1", reads=(1,)), *after(0, 7), work(7, "gather.py:2", writes=(1,))]) == []


def test_only_the_memory_that_both_use_counts() -> None:
    first = Work(0, "kernel", "op", 0, "a.py:1", writes=(Access(0, 100),))
    apart, within = (Work(0, "kernel", "op", 7, "b.py:2", reads=(Access(*ends),)) for ends in ((100, 150), (40, 60)))
    assert races([first, apart]) == []
    assert only([first, within]).kind == "read before its write"
    read = Work(0, "kernel", "op", 7, "b.py:2", reads=(Access(0, 50),))
    rest = Work(0, "kernel", "op", 0, "c.py:3", writes=(Access(50, 100),))
    assert races([first, *after(0, 7), read, rest]) == []
    again = [first, within, within]
    assert only(again).count == 2
    assert "2 x" in report(races(again))[0]


@dataclass(frozen=True)
class Step:
    """Work of a random program, and the earlier work that its stream waits for, by index."""

    stream: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    waits: tuple[int, ...]


def entries_of(steps: list[Step]) -> list[Entry]:
    """The program: an event after all work, and waits before it."""
    found: list[Entry] = []
    for number, step in enumerate(steps):
        found += [StreamWait(0, earlier, step.stream, "") for earlier in step.waits]
        found += [work(step.stream, f"line:{number}", step.reads, step.writes), EventRecord(0, number, step.stream, "")]
    return found


def reached(steps: list[Step]) -> list[set[int]]:
    """For all work, which work has ended before it begins."""
    before: list[set[int]] = []
    for number, step in enumerate(steps):
        direct = {*step.waits, *(earlier for earlier in range(number) if steps[earlier].stream == step.stream)}
        # A stream that waits holds back all of its later work, which is why waits of earlier work of the stream are in `before` of that.
        before.append(direct.union(*(before[earlier] for earlier in direct)))
    return before


def conflicts(steps: list[Step]) -> list[tuple[int, int]]:
    """Pairs of work that use the same memory, which one of them writes."""
    pairs = itertools.combinations(range(len(steps)), 2)

    def touch(first: Step, second: Step) -> bool:
        return bool({*first.writes} & {*second.writes, *second.reads} or {*first.reads} & {*second.writes})

    return [(first, second) for first, second in pairs if touch(steps[first], steps[second])]


@st.composite
def programs(draw: st.DrawFn) -> list[Step]:
    steps = []
    for number in range(draw(st.integers(2, 9))):
        blocks = st.lists(st.integers(0, 3), max_size=2, unique=True).map(tuple)
        waits = draw(st.lists(st.integers(0, number - 1), max_size=2, unique=True)) if number else []
        steps.append(Step(draw(st.integers(0, 3)), draw(blocks), draw(blocks), tuple(waits)))
    return steps


@given(programs())
def test_a_race_is_found_if_and_only_if_a_conflict_is_not_ordered(steps: list[Step]) -> None:
    before = reached(steps)
    assert bool(races(entries_of(steps))) == any(first not in before[second] for first, second in conflicts(steps))


@given(programs(), st.data())
def test_a_program_with_its_waits_has_no_race_and_one_less_has(steps: list[Step], data: st.DataObject) -> None:
    """Every conflict gets a wait if it is not ordered yet; then one that is necessary is taken away."""
    for second in range(len(steps)):
        for first in (first for first, other in conflicts(steps) if other == second):
            if first not in reached(steps)[second]:
                steps[second] = replace(steps[second], waits=(*steps[second].waits, first))
    assert races(entries_of(steps)) == []
    less = [(number, wait) for number, step in enumerate(steps) for wait in step.waits]
    if not less:
        return
    number, wait = data.draw(st.sampled_from(less))
    steps[number] = replace(steps[number], waits=tuple(other for other in steps[number].waits if other != wait))
    before = reached(steps)
    assert bool(races(entries_of(steps))) == any(first not in before[second] for first, second in conflicts(steps))
