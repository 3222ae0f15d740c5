"""Node-hours by bucket: of a supervised run that is killed and continues, of rare records, beside sacct, and as the tool prints them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline.common import events as written
from pipeline.report import account, goodput, run_files
from tests.helpers import ROOT, environment
from tests.report.builder import BEGIN, events, restarted, steps, write
from tests.training.test_blend import TINY

#: Plays srun on this machine: the ranks are one process, which is killed the first time, once step 7 is written.
SRUN = """#!/bin/bash
while [ "$1" != sh ]; do shift; done
[ -e {run}/killed ] && exec "$@"
"$@" & rank=$!
until grep -q '"step": 7,' {run}/metrics.jsonl 2> {run}/.grep; do sleep 0.02; done
touch {run}/killed; kill -9 $rank; echo "srun: error: n1: task 0: Killed" >&2; exit 137
"""


def bucket(found: dict[str, Any]) -> dict[str, float]:
    """Node-seconds of the buckets that are not empty."""
    return {name: round(3600 * hours, 3) for name, hours in found["buckets"].items() if round(3600 * hours, 3)}


def of_run(run_dir: Path, since: float = 0.0, now: float | None = None) -> dict[str, Any]:
    return goodput.summary([run_dir], since, time.time() if now is None else now, lambda _: {}, None)


@pytest.fixture
def status(called: Callable[..., str]) -> Callable[..., str]:
    """`status(*arguments)`: what tools/status prints."""
    return partial(called, "status")


@pytest.mark.long
def test_a_supervised_run_that_is_killed_and_continues(tokens: Path, tmp_path: Path) -> None:
    """Real records; only Slurm is played. Steps 6 and 7 are made again."""
    run = tmp_path / "run"
    for name, text in (("srun", SRUN.format(run=run)), ("scontrol", "#!/bin/bash\necho JobId=7 JobState=RUNNING\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "1", "SLURM_JOB_NODELIST": "n1", "PIPELINE_SLURM": str(ROOT / "slurm")}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    settings = (f"data.tokens={tokens}", f"run_dir={run}", "training.steps=15", "checkpoint.every=5", "training.validate_every=5")
    words = ["bash", str(ROOT / "slurm/pretrain.sbatch"), *TINY[1:], *settings, "training.validation_batches=2"]
    begin = time.time()
    done = subprocess.run(words, env=environment(**job, PATH=path), cwd=tmp_path, capture_output=True, timeout=240)
    wall = time.time() - begin
    assert done.returncode == 0, done.stderr.decode()
    found = of_run(run)
    spent = bucket(found["total"])
    recorded = written.read(run)
    job_seconds = recorded[-1]["time"] - recorded[0]["time"]
    assert sum(spent.values()) == pytest.approx(job_seconds, rel=0.01)
    assert job_seconds < wall
    assert spent.get("unknown", 0.0) < 0.01 * job_seconds, spent
    assert {"training", "validation", "saving", "loading", "start-up", "waiting", "lost"} <= spent.keys()
    (lost,) = found["lost"]
    assert "Killed" in lost["cause"]
    assert 0 < lost["made_again"] < lost["node_hours"]
    lines = run_files.read_metrics(run).content
    assert spent["training"] == pytest.approx(sum(line.get("seconds", 0.0) for line in lines), abs=0.01)
    assert found["nodes"] == [{"node": "n1", "times": 1, "reason": account.FIRST}]
    assert found["problems"] == {}


def test_records_of_a_version_without_times_of_saves(tmp_path: Path) -> None:
    """What builder.restarted describes: 780 node-seconds, and 25 s on two nodes of which no record tells what they were."""
    found = of_run(restarted(tmp_path / "run"))
    assert bucket(found["total"]) == {"training": 200, "start-up": 2 * (20 + 15 + 2), "waiting": 380, "lost": 80, "unknown": 46}
    assert found["lost"] == [{"cause": "b lost: RuntimeError: peer", "node_hours": 80 / 3600, "made_again": 0, "starts": 1}]
    assert found["jobs"] == {"7": 780 / 3600}


def test_every_time_of_a_run_outside_of_slurm(tmp_path: Path) -> None:
    """100 s: 8 of start-up, 6 of loading, 1 until the first step, 60 steps, 9 of saves and validations, 10 after the last step."""
    lines = steps(1, 60)
    lines[29:30] = [lines[29], {"step": 30, "validation_loss": 3.0, "validation_seconds": 5.0}]
    lines[40]["save_seconds"] = 4.0
    write(tmp_path, lines, total=60, done=60)
    begun = {"nodes": ["a"], "step": 0, "began": BEGIN - 14, "loading": 6.0, "abandoned": 0.0}
    events(tmp_path, (0, "run_start", begun), (7, "steps_start", {"step": 0}), (86, "run_end", {"code": 0, "step": 60}), job=None)
    found = of_run(tmp_path)
    assert bucket(found["total"]) == {"training": 60, "validation": 5, "saving": 4 + 10, "loading": 6, "start-up": 15}
    assert found["energy"]["unknown_node_hours"] == pytest.approx(100 / 3600)


def test_steps_before_a_damaged_checkpoint_and_after_a_spike_are_lost(tmp_path: Path) -> None:
    """Two starts of 50 steps; the third one finds only the checkpoint of step 40, and leaves 20 steps for a spike."""
    write(tmp_path, steps(1, 80), total=80)
    for number, step in enumerate((0, 50)):
        begun = {"nodes": ["a"], "step": step}
        events(tmp_path, (100 * number, "run_start", begun), (100 * number, "steps_start", {}), job=None)
        events(tmp_path, (100 * number + 60, "run_end", {"code": 1, "step": step + 50, "reason": "CUDA error"}), job=None)
    events(tmp_path, (200, "run_start", {"nodes": ["a"], "step": 40, "abandoned": 60.0}), (200, "steps_start", {}), job=None)
    events(tmp_path, (230, "rewind", {"seconds": 20.0, "checkpoint": 45}), (233, "steps_start", {}), job=None)
    events(tmp_path, (270, "run_end", {"code": 0, "step": 80}), job=None)
    found = of_run(tmp_path)
    assert bucket(found["total"]) == {"training": 40 + 40, "saving": 7, "lost": 60 + 20 + 23}
    assert {one["cause"]: round(3600 * one["made_again"]) for one in found["lost"]} == {"CUDA error": 60, "loss spikes": 23}


def test_phases_of_one_process_and_a_job_that_runs(tmp_path: Path) -> None:
    """Up to now; the first phase was not killed."""
    write(tmp_path, steps(1, 20), total=90)
    events(tmp_path, (0, "job_start", {"nodes": ["a", "b"], "started": BEGIN}), (5, "ranks_start", {"nodes": ["a", "b"]}))
    events(tmp_path, (8, "run_start", {"step": 0, "nodes": ["a", "b"]}), (8, "steps_start", {}))
    events(tmp_path, (20, "run_end", {"code": 75, "step": 10, "reason": "next phase"}))
    events(tmp_path, (22, "run_start", {"step": 10, "nodes": ["a", "b"], "began": BEGIN + 6}), (22, "steps_start", {}))
    os.utime(tmp_path / "metrics.jsonl", (BEGIN + 32, BEGIN + 32))
    found = of_run(tmp_path, now=BEGIN + 40)
    assert bucket(found["total"]) == {"training": 40, "start-up": 2 * 5, "saving": 4, "waiting": 10, "unknown": 2 * 8}
    silent = bucket(of_run(tmp_path, now=BEGIN + 9000)["total"])
    assert sum(silent.values()) == 2 * 32, "it was killed: up to what it wrote last"


def test_nodes_that_were_left_out(status: Callable[..., str], tmp_path: Path) -> None:
    restarted(tmp_path)
    for seconds, reason in ((70, "preflight: slow"), (180, "it does not answer")):
        events(tmp_path, (seconds, "exclude", {"nodes": ["b"], "reason": reason}))
    events(tmp_path, (250, "exclude", {"nodes": ["b", "c"], "reason": "it does not answer"}))
    found = [(one["node"], one["times"], one["reason"]) for one in of_run(tmp_path)["nodes"]]
    assert found[0] == ("b", 2, "left out: it does not answer")
    assert found[1:3] == [("a", 1, account.FIRST), ("b", 1, account.FIRST)]
    assert found[3:] == [("b", 1, "left out: preflight: slow"), ("c", 1, "left out: it does not answer")]
    for times, nodes in ((1, "b,c"), (3, "b"), (4, "")):  # a failed first, which the program may have caused
        assert status(tmp_path, "--since", "2026-01-01", "--bad-nodes", times) == f"{nodes}\n"


def test_a_time_limit_during_the_start_up_and_a_rank_that_lost_its_peer(tmp_path: Path) -> None:
    """What follows tells the cause; the node of the rank that followed is not blamed, and waiting in the queue is no time of the job."""
    write(tmp_path, [])
    peer = {"host": "a", "reason": "Connection closed by peer", "follows": True, "failed": True, "code": 1, "lost": ["b"]}
    events(tmp_path, (0, "job_start", {"nodes": ["a", "b"]}), (0, "ranks_start", {"nodes": ["a", "b"]}))
    events(tmp_path, (20, "ranks_end", {"code": 75, "failed": True}), (20, "action", {"action": "requeue", "reason": "the time limit"}))
    events(tmp_path, (30, "job_start", {"nodes": ["a", "b"]}), (30, "ranks_start", {"nodes": ["a", "b"]}))
    events(tmp_path, (60, "ranks_end", peer), (60, "action", {"action": "requeued", "reason": "Slurm", "code": 143}))
    found = of_run(tmp_path, now=BEGIN + 90)
    assert {one["cause"]: round(3600 * one["node_hours"]) for one in found["lost"]} == {
        "b lost: Connection closed by peer": 60,
        "the time limit": 40,
    }
    assert bucket(found["total"]) == {"lost": 100}
    assert [one["node"] for one in found["nodes"]] == ["b"]


def test_a_start_that_fails_before_its_first_step_has_made_none(tmp_path: Path) -> None:
    """Steps 6 to 10 of the killed start are in the file; the next one finds no token shards."""
    write(tmp_path, steps(1, 10))
    events(tmp_path, (0, "job_start", {"nodes": ["a"]}), (0, "ranks_start", {"nodes": ["a"]}), (0, "run_start", {"step": 0}))
    events(tmp_path, (12, "ranks_end", {"code": 137, "failed": True, "step": 5, "reason": "Killed"}), (12, "action", {"action": "restart"}))
    missing = {"code": 2, "failed": True, "step": 5, "reason": "is missing", "host": "a"}
    events(
        tmp_path, (12, "ranks_start", {"nodes": ["a"], "step": 5}), (30, "ranks_end", missing), (30, "action", {"action": "end", "code": 2})
    )
    found = of_run(tmp_path)
    assert {one["cause"]: (round(3600 * one["node_hours"]), one["made_again"]) for one in found["lost"]} == {
        "is missing": (18, 0),
        "Killed": (7, 0),
    }
    assert found["nodes"] == []


SACCT = "7|RESIZING|200|3|36000000|2026-11-18T10:00:00|x\n7|COMPLETED|160|2|3600000|2026-11-18T11:00:00|x\n"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            f"printf '{SACCT}'",
            ["sacct: 0.256 node-hours of 1 job", "records: +0.039 node-hours (job 7: +0.039)", "energy: 11.000 kWh by Slurm"],
        ),
        ("echo Slurm accounting storage is disabled >&2; exit 1", ["sacct: not compared: sacct -a: Slurm accounting storage is disabled"]),
        ("true", ["records: -0.217 node-hours (job 7: -0.217, unknown to sacct)", "energy: 0.217 node-hours of unknown power"]),
        ("echo 7 COMPLETED", ["sacct: not compared: sacct printed '7 COMPLETED', and not the fields"]),
    ],
)
def test_beside_sacct(status: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: list[str]) -> None:
    restarted(tmp_path / "runs/a b")
    (tmp_path / "sacct").write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/asked\n{script}\n')
    (tmp_path / "sacct").chmod(0o755)
    page = tmp_path / "page.html"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    printed = status(tmp_path / "runs", "--since", "2026-01-01", "--page", page)
    for text in said:
        assert text in printed
        assert text.replace("'", "&#39;") in page.read_text()
    assert (tmp_path / "asked").read_text().endswith("-j 7\n")
    assert "b lost: RuntimeError: peer" in printed


@pytest.mark.parametrize("script", ["exit 1", "echo '7|COMPLETED|390|2||x|y'", "echo '7|COMPLETED|390|2|18446744073709551614|x|y'"])
def test_planned_power_and_co2(status: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Without accounting, or where it measures no energy."""
    restarted(tmp_path / "run")
    with open(tmp_path / "run/config.yaml", "a") as handle:
        handle.write("cluster:\n  hardware: h100\n  tasks_per_node: 4\n")
    (tmp_path / "sacct").write_text(f"#!/bin/bash\n{script}\n")
    (tmp_path / "sacct").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = json.loads(status(tmp_path, "--since", "10000d", "--co2", 400, "--json"))
    kwh = 780 / 3600 * 4 * (700 + 575) / 1000
    assert (found["energy"]["planned_kwh"], found["energy"]["co2_kg"]) == (pytest.approx(kwh), pytest.approx(kwh * 0.4))
    assert [one["jobs"] for one in found["runs"]] == [["7"]]


def test_runs_without_time_and_damaged_ones_are_named(status: Callable[..., str], tmp_path: Path) -> None:
    restarted(tmp_path / "old")
    write(tmp_path / "none", steps(1, 30))
    write(tmp_path / "damaged", steps(1, 30))
    (tmp_path / "damaged/events.jsonl").write_text('{"time": 1, "event": "run_st')
    printed = status(tmp_path, "--since", "1m")
    assert f"0 node-hours of 0 runs and 0 Slurm jobs, - of them in steps that count; none of {tmp_path}/old" in printed
    assert "damaged: events.jsonl: the last line is incomplete" in printed
    assert "none: events.jsonl has no start of this run: starts, reasons and node-hours are not known" in printed


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--since", "30x"), "--since=30x: must be a duration (m, h, d, w) or a past date; write 30d, 12h, or 2026-11-01"),
        (("--since", "2999-01-01"), "--since=2999-01-01: must be a duration"),
        (("--since", "1d", "--csv"), "--csv: is not possible with --since"),
        (("--since", "1d", "--co2", "-1"), "--co2=-1: must be at least 0"),
        (("--co2", "380"), "--co2: is read with --since only"),
        (("--since", "1d", "--bad-nodes", "0"), "--bad-nodes=0: must be at least 1"),
        (("--since", "1d", "--bad-nodes", "1", "--json"), "--bad-nodes prints nothing but nodes"),
        (("--since", "1d", "--page", "/nowhere/page.html"), "--page=/nowhere/page.html: cannot be written: No such file or directory"),
    ],
)
def test_mistakes_are_named(status: Callable[..., str], tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    write(tmp_path / "run", steps(1, 3))
    assert said in status(tmp_path, *options, expect=2)
