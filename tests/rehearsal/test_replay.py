"""The replay of a recorded step: the clocks of the host and of the streams, and what the step spends its time on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import hardware
from pipeline.rehearsal.fused_products import overlapped
from pipeline.rehearsal.record import Allocate, Entry, EventRecord, Free, HostWait, RecordStream, StreamWait, Work, WorkKind
from pipeline.rehearsal.replay import replay
from pipeline.rehearsal.step_time import step_time


def kernel(time: float, seconds: float, stream: int = 0, site: str = "model.py:1") -> Work:
    return Work(time, "kernel", "aten::add", stream, site, seconds)


def collective(time: float, seconds: float, axis: str = "data", stream: int = 7) -> Work:
    return Work(time, "collective", "all_gather", stream, "gather.py:1", seconds, axis=axis)


def times(entries: list[Entry], **options: float) -> list[tuple[float, float]]:
    return [(placed.begin, placed.end) for placed in replay(entries, **options).work]  # type: ignore[arg-type]


def test_work_of_a_stream_runs_in_order_and_streams_beside_each_other() -> None:
    assert times([kernel(0, 5), kernel(1, 5), kernel(2, 5, stream=1)]) == [(0, 5), (5, 10), (2, 7)]
    assert times([kernel(0, 5), kernel(1, 5), kernel(2, 5, stream=1)], host=0) == [(0, 5), (5, 10), (0, 5)]


def test_a_stream_waits_for_what_an_event_has_recorded() -> None:
    entries = [kernel(0, 5), EventRecord(0, 1, 0, ""), kernel(0, 5), StreamWait(0, 1, 2, ""), kernel(0, 1, stream=2)]
    assert times(entries)[-1] == (5, 6)
    again = [*entries[:3], EventRecord(0, 1, 0, ""), *entries[3:]]
    assert times(again)[-1] == (10, 11), "the newest record of the event counts"
    assert times([StreamWait(0, 1, 2, ""), kernel(0, 1, stream=2)]) == [(0, 1)], "an event that was never recorded is complete"


@pytest.mark.parametrize("wait, end", [({"event": 1}, 5), ({"stream": 2}, 3), ({}, 10)], ids=["event", "stream", "device"])
def test_the_host_waits(wait: dict[str, int], end: float) -> None:
    entries = [kernel(0, 5), EventRecord(0, 1, 0, ""), kernel(0, 5), kernel(0, 3, stream=2), HostWait(1, "item", "loss.py:3", **wait)]
    found = replay([*entries, kernel(2, 1, stream=3)])
    assert (found.waits[0].begin, found.waits[0].end) == (1, end)
    assert found.work[-1].begin == end + 1


def test_the_queue_of_a_stream_is_bounded() -> None:
    found = replay([kernel(0, 10) for _ in range(4)], queue=2)
    assert [placed.queued for placed in found.work] == [0, 0, 10, 20]
    assert found.blocked == 20


def test_exposed_communication_and_a_late_host() -> None:
    step = [
        kernel(0, 10),
        collective(0, 14),
        EventRecord(0, 1, 7, ""),
        StreamWait(0, 1, 0, ""),
        kernel(0, 6),  # 14 to 20, waits for the collective
        kernel(25, 5, site="late.py:2"),  # 25 to 30
        HostWait(26, "item", "loss.py:3"),
        kernel(28, 2),  # 32 to 34
        collective(28, 1, axis="tensor"),
    ]
    found = step_time(replay(step))
    assert (found.step, found.compute, found.communication) == (34, 23, {"data": 14, "tensor": 1})
    assert (found.exposed, found.exposed_axes) == (4, {"data": 4, "tensor": 0})
    assert (found.host, found.host_sites, found.other) == (7, {"late.py:2": 5, "loss.py:3": 2}, 0)
    assert found.exposed_intervals == [(10, 14)]
    assert found.host_intervals == [(20, 25), (30, 32)]


def test_communication_at_the_end_is_exposed_and_an_empty_record_takes_no_time() -> None:
    assert step_time(replay([kernel(0, 1), collective(0, 3)])).exposed == 2
    assert step_time(replay([])).step == 0


KINDS: tuple[WorkKind, ...] = ("kernel", "product", "kernel", "copy")
WORK = st.builds(
    lambda time, seconds, stream, axis: (
        collective(time, seconds, axis, 7 + len(axis)) if axis else Work(time, KINDS[stream], "op", stream, "", seconds)
    ),
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(0, 3),
    st.sampled_from(["", "", "data", "tensor"]),
)
EVENTS = st.one_of(
    st.builds(lambda event, stream: EventRecord(0, event, stream, ""), st.integers(0, 2), st.sampled_from([0, 1, 11])),
    st.builds(lambda event, stream: StreamWait(0, event, stream, ""), st.integers(0, 2), st.sampled_from([0, 1, 11])),
    st.builds(lambda event: HostWait(0, "item", "loss.py:3", event=event), st.integers(0, 2)),
)


@given(st.lists(st.one_of(WORK, EVENTS), max_size=25))
def test_the_parts_of_a_step_sum_to_it(entries: list[Entry]) -> None:
    time, ordered = 0.0, []
    for entry in entries:
        time += entry.time
        ordered.append(type(entry)(time, *(getattr(entry, name) for name in entry.__slots__[1:])))
    found = step_time(replay(ordered))
    assert found.compute + found.exposed + found.host + found.other == pytest.approx(found.step)
    assert sum(found.host_sites.values()) == pytest.approx(found.host)
    assert replay(ordered, host=0).seconds <= found.step


def test_memory_that_streams_still_use_is_held() -> None:
    entries: list[Entry] = []
    for number in range(4):
        entries += [Allocate(number, number, 100, 0, ""), kernel(number, 10, stream=1)]
        entries += [RecordStream(number, number, 1, ""), Free(number, number, "reduce.py:9")]
    found = replay(entries).memory
    assert (found.allocated, found.held, found.peak) == (100, 400, 400)
    assert found.sites == {"reduce.py:9": 300}
    bounded = [Free(e.time, e.address, e.site) if isinstance(e, Free) else e for e in entries if not isinstance(e, RecordStream)]
    assert replay(bounded).memory.held == 0


@pytest.mark.parametrize("sent, end", [(4.0, 8.0), (14.0, 16.0)], ids=["products take longer", "the collective takes longer"])
@pytest.mark.parametrize("gathers", [True, False], ids=["gather", "reduce"])
def test_fused_products_run_beside_their_collective(gathers: bool, sent: float, end: float) -> None:
    """Of 4 ranks: the product of one shard (2 of 8 seconds) is before or after the collective, the others are beside it."""
    product = replace(kernel(0, 8), kind="product", name="aten::mm")
    work = replace(collective(0, sent, "tensor"), name="all_gather" if gathers else "reduce_scatter")
    beside = [EventRecord(0, 1, 0, ""), StreamWait(0, 1, 7, ""), work, EventRecord(0, 2, 7, ""), StreamWait(0, 2, 0, "")]
    copied = [] if gathers else [kernel(0, 1)]
    entries = [*beside, product] if gathers else [product, *copied, *beside]
    assert replay(entries).seconds == 8 + sent + len(copied)
    found = replay(overlapped(entries, 4, hardware.load("h100")))
    summed = sum(placed.end - placed.begin for placed in found.work if placed.work.name.startswith("sum"))
    assert found.seconds - summed == pytest.approx(end)
    assert (summed > 0) == (not gathers)
    assert sum(placed.work.seconds for placed in found.work if placed.work.kind == "product") == pytest.approx(8)
