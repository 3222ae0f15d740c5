"""events.jsonl: order, torn lines, and a file system that is full."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.common import events


def test_events_of_several_writers_are_whole_lines(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda n: events.record(tmp_path, "run_start", step=n, text="x" * 3000), range(64)))
    assert sorted(event["step"] for event in events.read(tmp_path)) == list(range(64))


def test_a_torn_line_is_skipped_and_does_not_damage_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    events.record(tmp_path, "run_start", step=3)
    with (tmp_path / events.FILE).open("a") as handle:
        handle.write('{"time": 1, "event": "run_')
    events.record(tmp_path, "run_end", step=4)
    assert [(event["event"], event["step"], event["job"]) for event in events.read(tmp_path)] == [
        ("run_start", 3, "17"),
        ("run_end", 4, "17"),
    ]


def test_an_event_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / events.FILE).symlink_to("/dev/full")
    with caplog.at_level(logging.WARNING, logger="pipeline"):
        events.record(tmp_path, "run_start")
    assert "run_start was not recorded: No space left on device" in caplog.text
    assert events.read(tmp_path / "nowhere") == []
