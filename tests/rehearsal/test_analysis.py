"""Findings of a made-up record of two steps, their lines and content, and the timeline."""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from types import CellType, FunctionType

import pytest

from pipeline.common.timeline import LEFT, WIDTH
from pipeline.config import hardware
from pipeline.rehearsal import timeline
from pipeline.rehearsal.analysis import analyze
from pipeline.rehearsal.record import STEP, Access, Entry, EventRecord, HostWait, Mark, StreamWait, Work
from pipeline.rehearsal.source_lines import SourceLines

GPU = hardware.load("h100")


def gather(block: int, seconds: float) -> list[Entry]:
    """A gathering of a block's weights, on stream 7, and the event at its end."""
    where = (Access(block, block + 1),)
    work = Work(0, "collective", "all_gather", 7, "gather.py:1", seconds, writes=where, axis="data", size=1)
    return [EventRecord(0, 90, 0, ""), StreamWait(0, 90, 7, ""), work, EventRecord(0, block, 7, "")]


def use(block: int, seconds: float) -> list[Entry]:
    """A block that waits for its weights."""
    return [
        StreamWait(0, block, 0, "wait.py:2"),
        Work(0, "product", "aten::mm", 0, f"block.py:{block}", seconds, reads=(Access(block, block + 1),)),
    ]


def record(order: tuple[int, ...]) -> list[Entry]:
    """Two steps: use blocks 1, 2 and 3, each 2 seconds; read the loss; gather all for the next step, each 1 second."""
    step: list[Entry] = [Mark(0, STEP), *(entry for block in (1, 2, 3) for entry in use(block, 2))]
    step += [HostWait(0, "stream", "loss.py:3", stream=0), *(entry for block in order for entry in gather(block, 1))]
    first = [entry for block in order for entry in gather(block, 1)]
    return [*first, *step, *step]


def test_gathers_in_the_order_of_use_hide_and_others_are_named() -> None:
    right, wrong = analyze(record((1, 2, 3)), GPU), analyze(record((2, 3, 1)), GPU)
    assert (right.time.step, right.time.exposed, right.late_gathers) == (7, 1, [])
    assert (wrong.time.step, wrong.time.exposed) == (9, 3)
    (late,) = wrong.late_gathers
    assert (late.site, late.user, late.count, late.behind, late.seconds) == ("gather.py:1", "block.py:1", 2, 2, 2)
    assert any("gather.py:1, used at block.py:1, queued behind up to 2" in line for line in wrong.lines())
    assert right.races == wrong.races == []


def test_what_is_reported_of_the_last_step() -> None:
    found = analyze(record((1, 2, 3)), GPU)
    assert found.collectives == {("data", "all_gather"): (3, 3, 3)}
    assert [(wait.site, wait.count, wait.seconds) for wait in found.waits] == [("loss.py:3", 1, 7)]
    content = json.loads(json.dumps(found.content(), allow_nan=False))
    assert content["times"]["this_host"]["exposed_axes"] == {"data": 1}
    assert content["collectives"] == [{"axis": "data", "name": "all_gather", "count": 3, "bytes": 3, "seconds": 3}]
    assert not any("bubble" in text for text in content["unknown"])
    sent = Work(0, "collective", "send", 9, "", 1, axis="pipeline")
    assert any("bubble" in text for text in analyze([sent], GPU).content()["unknown"])


def test_host_times_are_scaled_to_those_of_a_step_that_is_not_recorded() -> None:
    entries: list[Entry] = [Work(4.0 * number, "kernel", "op", 0, "slow.py:1", 1) for number in range(3)]
    assert analyze(entries, GPU).time.step == 9
    assert analyze(entries, GPU, host_seconds=4).time.step == 5
    assert analyze([], GPU).time.step == 0


def test_the_timeline_shows_the_step(tmp_path: Path) -> None:
    found = analyze(record((2, 3, 1)), GPU)
    timeline.write(found, tmp_path / "timeline.html")
    text = (tmp_path / "timeline.html").read_text()
    for name in ("kernels, stream 0x0", "data, stream 0x7", "host", "collectives: data", "matrix products", "order of collectives"):
        assert name in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    shown = timeline.step(found).picture("step", *found.time.window)
    pixels = (WIDTH - LEFT - 10) / 9
    lengths = {row.name: sum(int(bar.width) for bar in row.bars) for row in shown.rows}
    # The last gathers run beyond the end of the step's computation: they belong to the next one.
    assert lengths == {
        "host": pytest.approx(9 * pixels, abs=3),
        "kernels, stream 0x0": pytest.approx(6 * pixels, abs=3),
        "data, stream 0x7": pytest.approx(3 * pixels, abs=3),
    }
    assert sum(int(bar.width) for bar in shown.exposed) == pytest.approx(3 * pixels, abs=3)
    with gzip.open(tmp_path / "timeline.json.gz", "rt") as handle:
        events = [event for event in json.load(handle)["traceEvents"] if event["ph"] == "X"]
    assert sum(event["dur"] for event in events if event["name"] == "aten::mm") == 12e6
    assert {event["args"]["line"] for event in events if event["name"] == "data all_gather"} == {"gather.py:1"}


def test_names_of_the_job_are_escaped(tmp_path: Path) -> None:
    entries = [replace(entry, site="<b>") if isinstance(entry, Work) else entry for entry in record((1, 2, 3))]
    timeline.write(analyze(entries, GPU), tmp_path / "timeline.html")
    assert not re.search("<b>(?!Matrix)", (tmp_path / "timeline.html").read_text())


def test_lines_of_code_that_the_compiler_made_with_a_constant_without_a_hash(tmp_path: Path) -> None:
    lines = SourceLines(tmp_path)
    code = (lambda: lines.here()).__code__
    made = FunctionType(
        code.replace(co_consts=(*code.co_consts, {}), co_filename=f"{tmp_path}/block.py"), {}, None, None, (CellType(lines),)
    )
    assert made() == f"block.py:{code.co_firstlineno}"
