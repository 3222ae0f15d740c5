"""A job that a maintenance keeps waiting is told so, with the longest time that still fits."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from pipeline.config.cluster import ClusterConfig
from pipeline.launch import maintenance, slurm

JOB = ClusterConfig(nodes=2, time="02:00:00")
NODES = "n1 idle\nn2 mixed\nn3 idle\nn4 down*\n"


def stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + seconds))


def reserve(monkeypatch: pytest.MonkeyPatch, begin: float, end: float, nodes: str = "n[1-4]", flags: str = "MAINT,SPEC_NODES") -> None:
    """Let Slurm have a reservation that begins and ends so many seconds from now."""
    line = f"ReservationName=upgrade StartTime={stamp(begin)} EndTime={stamp(end)} Nodes={nodes} NodeCnt=4 Flags={flags} State=INACTIVE\n"
    monkeypatch.setattr(slurm, "command", lambda words, **_: line if words[0] == "scontrol" else NODES)


def test_a_job_that_ends_later(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve(monkeypatch, 5430, 9000)
    text, fix = maintenance.notice(JOB) or ("", "")
    assert "maintenance upgrade begins at" in text
    assert "a job of 02:00:00 starts after it" in text
    assert fix == "the longest time that still fits is cluster.time=1:30:00"
    assert maintenance.notice(replace(JOB, time="01:30:00")) is None
    reserve(monkeypatch, 86400 + 7230, 200000)
    assert (maintenance.notice(replace(JOB, time="2-00:00:00")) or ("", ""))[1].endswith("cluster.time=1-2:00:00")


@pytest.mark.parametrize(
    ("begin", "end", "nodes", "flags"),
    [
        (10000, 20000, "n[1-4]", "MAINT"),  # after the job
        (-9000, -60, "n[1-4]", "MAINT"),  # over
        (600, 9000, "n[1-4]", "SPEC_NODES"),  # of somebody else: Slurm chooses other nodes
        (600, 9000, "n1", "MAINT"),  # two usable nodes remain
    ],
)
def test_jobs_that_start_at_once(begin: float, end: float, nodes: str, flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve(monkeypatch, begin, end, nodes, flags)
    assert maintenance.notice(JOB) is None


def test_too_few_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """n4 is down: one usable node remains, on which a moldable job starts."""
    reserve(monkeypatch, 600, 9000, "n[1-2]")
    assert maintenance.notice(JOB) is not None
    assert maintenance.notice(replace(JOB, min_nodes=1)) is None
    reserve(monkeypatch, 600, 9000, "n1")
    assert maintenance.notice(replace(JOB, spares=1)) is not None, "two nodes and a spare one"


def test_maintenance_that_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve(monkeypatch, -600, 9000)
    text, fix = maintenance.notice(JOB) or ("", "")
    assert "has begun, until" in text
    assert fix == "no shorter time helps"


def test_a_site_file_says_it_where_slurm_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(words: list[str], **_: object) -> str:
        raise slurm.SlurmError(f"{words[0]}: not found")

    monkeypatch.setattr(slurm, "command", absent)
    assert "starts after it" in (maintenance.notice(replace(JOB, name="pine", maintenance=stamp(3630)[:16])) or ("", ""))[0]
    assert maintenance.notice(replace(JOB, maintenance=stamp(-60)[:16])) is None
    assert maintenance.notice(JOB) is None
