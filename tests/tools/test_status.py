"""tools/status and tools/watch: the table of runs as text, CSV and JSON, and a run that is followed to its end."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.report import table
from tests.helpers import ROOT, environment
from tests.report.builder import BEGIN, events, restarted, steps, validation, write


def tool(name: str, *arguments: object, expect: int = 0, **more: str) -> str:
    """Run a tool as users do; what it printed, both streams."""
    command = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    done = subprocess.run(command, env=environment(**more), text=True, timeout=120, check=False, **streams)
    assert done.returncode == expect, done.stdout
    return done.stdout


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A finished run, one that is running, a damaged one in a sweep, and folders without runs."""
    folder = tmp_path / "runs"
    restarted(folder / "done")
    (folder / "done/checkpoints/step-00000100/metrics.jsonl").parent.mkdir(parents=True)
    (folder / "done/checkpoints/step-00000100/metrics.jsonl").touch()
    write(folder / "now", [*steps(1, 30, seconds=2.0), validation(30, 3.25)], total=90)
    events(folder / "now", (0, "run_start", {"nodes": ["a"], "step": 0}), job=None)
    write(folder / "lr sweep/10", [])
    (folder / "lr sweep/10/config.yaml").unlink()
    (folder / "lr sweep/10/events.jsonl").write_text("{\n")
    for name in ("events.jsonl", "metrics.jsonl"):
        os.utime(folder / "lr sweep/10" / name, (BEGIN, BEGIN))
    (folder / "lr sweep/9").mkdir()
    (folder / "imported/checkpoints/step-00000001").mkdir(parents=True)
    return folder


def test_alerts(tmp_path: Path, called: Callable[..., str]) -> None:
    folder, told, now = tmp_path / "runs", tmp_path / "told", time.time() - BEGIN
    write(folder / "failed", steps(1, 30))
    events(folder / "failed", (now - 60, "run_start", {"nodes": ["a"], "step": 0}))
    events(
        folder / "failed",
        (now - 30, "run_end", {"code": 1, "reason": "RuntimeError: no memory", "step": 0}),
        (now - 29, "job_end", {"code": 1}),
    )
    write(folder / "silent", steps(1, 30))
    events(folder / "silent", (now - 3600, "run_start", {"nodes": ["a"], "step": 0}))
    os.utime(folder / "silent/metrics.jsonl", (BEGIN + now - 3600, BEGIN + now - 3600))
    write(folder / "old", steps(1, 30))
    events(folder / "old", (0, "run_start", {"nodes": ["a"], "step": 0}), (9, "run_end", {"code": 1, "reason": "long ago", "step": 0}))
    os.utime(folder / "old/metrics.jsonl", (BEGIN, BEGIN))
    for name, last in (
        ("slow", steps(151, 250, 2.0)),
        ("steady", steps(151, 250, 1.1)),
        ("stops", [*steps(151, 240), *steps(241, 250, 30)]),
    ):
        write(folder / name, [*steps(1, 150), *last], total=900)
        events(folder / name, (now - 400, "run_start", {"nodes": ["a"], "step": 0}))

    def call(command: str = f'printf \'%s|%s|%s\\n\' "$1" "$2" "$3" >> {told}', expect: int = 0) -> list[str]:
        told.write_text("")
        called("alert", folder, "--command", command, expect=expect)
        return sorted(told.read_text().replace(f"{folder}/", "").splitlines())

    assert call("exit 3", expect=1) == []
    lines = call()
    assert [line.rpartition("|")[0] for line in lines] == ["failed|failed", "silent|silent", "slow|slow", "slow|stops"]
    assert "RuntimeError: no memory" in lines[0]
    assert lines[2].endswith("at step 250: 64 tokens/s in the last 100 steps, 128 before")
    assert call() == [], "each is told once"
    events(folder / "failed", (now, "run_start", {"nodes": ["a"], "step": 30}))
    assert [line.rpartition("|")[0] for line in call()] == ["recovered|failed"]
    events(folder / "failed", (now + 1, "run_end", {"code": 1, "reason": "again", "step": 30}), (now + 2, "job_end", {"code": 1}))
    assert [line.rpartition("|")[0] for line in call()] == ["failed|failed"]
    (folder / ".alerts.json").write_text("{")
    assert "remove it" in called("alert", folder, "--command", "true", expect=2)
    assert "--command is empty" in called("alert", folder, "--command", " ", expect=2)


def test_alerts_of_several_calls_and_folders(tmp_path: Path) -> None:
    write(tmp_path / "runs/silent", steps(1, 30))
    events(tmp_path / "runs/silent", (time.time() - BEGIN - 3600, "run_start", {"nodes": ["a"], "step": 0}))
    os.utime(tmp_path / "runs/silent/metrics.jsonl", (time.time() - 3600,) * 2)
    began = f"touch {tmp_path}/began; while ! [ -e {tmp_path}/end ]; do sleep 0.05; done; exit 1"
    command = [sys.executable, str(ROOT / "tools/alert"), str(tmp_path / "runs"), "--command", began]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=environment(), text=True) as first:
        while not (tmp_path / "began").exists():
            time.sleep(0.02)
        assert "another call goes on" in tool("alert", tmp_path / "runs", "--command", "echo told")
        (tmp_path / "end").touch()
        assert first.wait(60) == 1
    printed = tool("alert", tmp_path / "runs", tmp_path / "gone", "--command", 'echo told "$1"', expect=1)
    assert "told silent" in printed, "also if another folder is missing"
    assert "gone: there is no such folder" in printed


def test_a_loop_of_links_and_a_loss_that_is_no_number(runs: Path, called: Callable[..., str]) -> None:
    (runs / "lr sweep/all").symlink_to(runs)
    write(runs / "nan", [*steps(1, 30), validation(30, float("nan"))], total=90)
    names = [row["run_dir"].rpartition("/")[2] for row in json.loads(called("status", runs, "--json", "--sort", "validation_loss"))]
    assert names[:2] == ["done", "now"]
    assert sorted(names[2:]) == ["10", "nan"]


def test_the_table(runs: Path) -> None:
    lines = tool("status", runs).splitlines()
    assert lines[0] == f"{runs}: 1 running, 1 finished, 1 silent"
    rows = {line[:11].rstrip(): re.split(r"  +", line) for line in lines[3:6]}
    assert rows["done"][1:10] == ["finished", "100/100", "3.0644", "3.0200 +- 0.010", "128", "-", "1", "0.22", "7"]
    assert rows["now"][1:8] == ["running", "30/90", rows["now"][3], "3.2500 +- 0.010", "64", "2 min", "0"]
    assert rows["lr sweep/10"][1] == "silent"
    assert "lr sweep/10: events.jsonl: the last line is incomplete" in lines
    assert "lr sweep/10: config.yaml is missing or damaged: the number of steps is not known" in lines


def test_csv_and_json_have_the_same_numbers(runs: Path, called: Callable[..., str]) -> None:
    content = json.loads(called("status", runs, "--json", "--sort", "loss"))
    rows = list(csv.DictReader(io.StringIO(called("status", runs, "--csv", "--sort", "loss"))))
    assert [Path(row["run_dir"]).name for row in content] == ["done", "now", "10"]
    for row, one in zip(rows, content, strict=True):
        expected = {name: "" if value is None else str(value) for name, value in one.items() if name != "problems"}
        assert row | {"reason": ""} == expected | {"reason": ""}, "the reason says how long ago a run wrote"
    assert (content[0]["node_hours"], content[0]["restarts"], content[1]["seconds_left"]) == (780 / 3600, 1, 120.0)
    assert content[2]["problems"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("status", "nowhere"), "there is no such folder"),
        (("status", "lr sweep/9"), "no training run within 3 levels"),
        (("status", ".", "--depth", 0), "no training run within 0 levels"),
        (("watch", "."), "is no run directory"),
        (("watch", "nowhere", "--once"), "is no run directory"),
        (("watch", "now", "--every", 0), "must be above 0"),
        (("watch", "now", "--page", "no/page.html"), "there is no folder"),
    ],
)
def test_mistakes_are_named(
    runs: Path, called: Callable[..., str], monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], said: str
) -> None:
    monkeypatch.chdir(runs)
    assert said in called(*words, expect=2)


def test_no_checkpoint_is_listed_and_no_torch_is_loaded(runs: Path) -> None:
    program = f"""
import sys, builtins, os
opened = []
sys.addaudithook(lambda event, values: opened.append(str(values[0])) if event in ("os.scandir", "os.listdir", "open") else None)
sys.argv = ["status", {str(runs)!r}]
import runpy
try: runpy.run_path({str(ROOT / "tools/status")!r}, run_name="__main__")
except SystemExit as end: assert end.code == 0
below = sorted(set(name for name in opened if name.startswith({str(runs)!r})))
assert any(name.endswith("done/metrics.jsonl") for name in below), below
assert not [name for name in below if "checkpoints" in name], below
assert not {{"torch", "numpy", "hydra", "omegaconf"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", program], env=environment(), check=True, capture_output=True, timeout=120)


def test_watch_once(runs: Path) -> None:
    printed = tool("watch", runs / "now", "--once", COLUMNS="100")
    assert f"{runs}/now  [##########....................]" in printed
    assert "step 30 of 90 (33.3 %), 2 min left at 2 s a step" in printed
    assert "3.2500 +- 0.0100 at step 30" in printed
    assert re.search(r"^loss [▁▂▃▄▅▆▇█]{30} last 30 steps$", printed, re.MULTILINE)


def test_watch_waits_for_a_run_and_follows_it_to_its_end(runs: Path) -> None:
    command = [sys.executable, str(ROOT / "tools/watch"), str(runs / "now"), "--every", "0.05", "--page", str(runs / "page.html")]
    (runs / "now").rename(runs / "later")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()) as watch:
        assert watch.stdout is not None
        assert watch.stderr is not None
        assert "Waiting for its job to begin" in watch.stderr.readline()
        (runs / "later").rename(runs / "now")
        assert "running: step 30 of 90" in watch.stdout.readline()
        with open(runs / "now/metrics.jsonl", "a") as handle:
            handle.write(json.dumps(steps(31, 31)[0]) + "\n")
        assert "running: step 31 of 90" in watch.stdout.readline()
        assert "<meta http-equiv=refresh content=" in (runs / "page.html").read_text()
        write_time = time.time()
        with open(runs / "now/events.jsonl", "a") as handle:
            handle.write(json.dumps({"time": write_time, "event": "run_end", "job": None, "code": 1, "reason": "CUDA error"}) + "\n")
        assert "CUDA error" in watch.stdout.readline()
        assert watch.wait(60) == 1
    page = (runs / "page.html").read_text()
    assert "refresh" not in page, "the last one is not read again"
    assert all(name in page for name in ("each step", "means", "validation", "CUDA error"))


def test_watch_on_a_terminal_draws_the_view_again(runs: Path) -> None:
    restart = [sys.executable, str(ROOT / "tools/watch"), str(runs / "done")]
    leader, follower = os.openpty()
    done = subprocess.run(restart, stdout=follower, env=environment(COLUMNS="90"), timeout=60, check=True)
    os.close(follower)
    text = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert done.returncode == 0
    assert text.startswith("\033[H\033[2J")
    assert "What changed at the last restart?" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="requires root, to become another user")
def test_runs_of_another_user_that_cannot_be_read(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder for its owner alone (umask 077) is named, and the others are listed."""
    (runs / "now").chmod(0o700)
    for folder in (runs, *(folder for folder in runs.parents if "pytest-of" in str(folder))):
        folder.chmod(0o755)
    os.seteuid(65534)
    try:
        found = table.runs_below(runs)
    finally:
        os.seteuid(0)
    assert [path.name for path in found] == ["done", "10"]
    assert caplog.messages == [f"{runs}/now: cannot be read (Permission denied): runs in it are left out"]
