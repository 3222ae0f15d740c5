"""The jobs of a chain are told a time: from the steps of the run so far, from an earlier job of the stage, or from the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.launch import job_times, slurm
from pipeline.launch.stage_chain import Link
from tests.report.builder import events, steps, write
from tests.world import configured


def link(stage: str, *words: str, run_dir: Path, **cluster: object) -> Link:
    """A job of two nodes and 24 hours."""
    config = configured(f"stage={stage}", *words, f"run_dir={run_dir}")
    options = replace(config.cluster, nodes=2, time="24:00:00", **cluster)
    return Link(stage, (*words, f"run_dir={run_dir}"), config, options, 16)


def accounting(monkeypatch: pytest.MonkeyPatch, printed: str) -> None:
    """Let sacct print this, whatever the job's name; with states, it needs both ends of the time."""
    monkeypatch.setattr(slurm, "command", lambda words, **_: printed if {"sacct", "-s", "-S", "-E"} <= set(words) else "")


def test_steps_that_were_measured(tmp_path: Path) -> None:
    """940 steps of 2 s, and a quarter more, in quarters of an hour."""
    write(tmp_path, steps(1, 60, seconds=2.0), total=1000)
    events(tmp_path, (0, "run_start", {"nodes": ["a", "b"], "step": 0, "layout": ""}))
    job = link("pretrain", "training.steps=1000", run_dir=tmp_path)
    assert list(job_times.proposals([job], tmp_path)) == [
        "pretrain takes about 0:31:20 by its last steps (2 s each), and asks for 24:00:00: "
        "'submit.overrides.pretrain=[\"cluster.time=0:45:00\"]' may start earlier"
    ]
    assert list(job_times.proposals([replace(job, arguments=(*job.arguments, "cluster.time=24:00:00"))], tmp_path)) == [], "it is given"
    one_node = replace(job, cluster=replace(job.cluster, nodes=1))
    assert list(job_times.proposals([one_node], tmp_path)) == [], "another number of nodes has another speed"
    long = replace(job, config=configured("stage=pretrain", "training.steps=100000", f"run_dir={tmp_path}"))
    assert list(job_times.proposals([long], tmp_path)) == [
        "pretrain takes about 2-7:31:20 by its last steps (2 s each): 3 jobs of 24:00:00"
    ]


def test_an_earlier_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest one of the same number of nodes: the second finds its output complete, and ends at once."""
    accounting(monkeypatch, "2|4000\n2|12\n8|600\n")
    job = link("tokenize", run_dir=tmp_path)
    (text,) = job_times.proposals([job], tmp_path)
    assert "tokenize takes about 1:06:40 by an earlier job" in text
    assert "cluster.time=1:30:00" in text
    short = replace(job, cluster=replace(job.cluster, time="01:00:00"))
    assert "set cluster.time, or submit it again" in next(job_times.proposals([short], tmp_path))
    accounting(monkeypatch, "")
    assert list(job_times.proposals([job], tmp_path)) == []


def test_the_plan(tmp_path: Path) -> None:
    """Where nothing was measured; without cluster.hardware there is none."""
    words = ("model=llama-tiny", "training.steps=100", "training.micro_batch_size=1", "training.global_batch_size=16")
    job = link("pretrain", *words, "cluster.hardware=h100", "cluster.tasks_per_node=8", run_dir=tmp_path)
    (text,) = job_times.proposals([job], tmp_path)
    assert "by the plan (" in text
    assert "cluster.time=0:15:00" in text
    assert list(job_times.proposals([link("pretrain", *words, run_dir=tmp_path)], tmp_path)) == []
