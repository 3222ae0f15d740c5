"""What a user asks a running job for: `touch RUN/save` and `touch RUN/stop`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.common import events
from pipeline.common.errors import ToBeContinued
from pipeline.launch import recovery
from pipeline.training import request_files
from pipeline.training.checkpoint_hooks import CheckpointHooks
from pipeline.training.request_files import RequestFiles
from tests.helpers import start_ranks
from tests.training import one_rank

STEPS = ("training.steps=12", "checkpoint.every=0")


def touching(run_dir: Path, files: dict[int, str]) -> CheckpointHooks:
    """Hooks that make a file of the run directory after each of some steps."""

    def touch(step: int) -> bool:
        if step in files:
            (run_dir / files[step]).touch()
        return False

    return CheckpointHooks(writes=touch)


def checkpoints(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").glob("step-*"))


@pytest.fixture
def looks_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_files, "INTERVAL", 0.0)


@pytest.mark.usefixtures("looks_at_every_step")
@pytest.mark.parametrize("saves", ["auto", pytest.param("off", marks=pytest.mark.long)])
def test_a_run_saves_and_stops_when_it_is_asked_to_and_continues_bit_for_bit(tokens: Path, tmp_path: Path, saves: str) -> None:
    settings = (f"data.tokens={tokens}", f"checkpoint.async_save='{saves}'", *STEPS)
    one_rank.run("pretrain", tmp_path / "straight", *settings)
    run_dir, began = tmp_path / "asked", time.time()
    with pytest.raises(ToBeContinued) as ended:
        one_rank.run("pretrain", run_dir, *settings, hooks=touching(run_dir, {3: "save", 7: "stop"}))
    assert ended.value.code == 75
    assert checkpoints(run_dir) == [5, 9], "seen at the next step, decided with that, and acted on after one more"
    assert not {"save", "stop"} & {path.name for path in run_dir.iterdir()}, "what was done is removed"
    assert events.read(run_dir)[-1]["reason"] == "stop"
    assert recovery.was_stopped(run_dir, began)
    assert not (run_dir / "manifest.json").exists()

    one_rank.run("pretrain", run_dir, *settings)
    straight, asked = (one_rank.lines(folder) for folder in (tmp_path / "straight", run_dir))
    assert [line["loss"] for line in asked.values()] == [line["loss"] for line in straight.values()]
    assert not recovery.was_stopped(run_dir, time.time())


@pytest.mark.usefixtures("looks_at_every_step")
def test_a_file_of_an_earlier_job_does_not_stop_the_next_one(tokens: Path, tmp_path: Path) -> None:
    """Except for a job under a supervisor, which has removed older files."""
    (tmp_path / "stop").touch()
    one_rank.run("pretrain", tmp_path, f"data.tokens={tokens}", *STEPS)
    assert checkpoints(tmp_path) == [12]
    assert not (tmp_path / "stop").exists()


@pytest.mark.usefixtures("looks_at_every_step")
def test_ranks_that_start_again_within_a_job_find_what_it_was_asked_for(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_ENDS", str(tmp_path / "ends"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stop").touch()
    with pytest.raises(ToBeContinued):
        one_rank.run("pretrain", tmp_path / "run", f"data.tokens={tokens}", *STEPS)
    assert checkpoints(tmp_path / "run") == [2]


@pytest.mark.usefixtures("looks_at_every_step")
def test_a_stop_at_the_last_step_is_a_finished_run(tokens: Path, tmp_path: Path) -> None:
    one_rank.run("pretrain", tmp_path, f"data.tokens={tokens}", *STEPS, hooks=touching(tmp_path, {10: "save", 11: "stop"}))
    assert (tmp_path / "manifest.json").exists()
    assert not {"save", "stop"} & {path.name for path in tmp_path.iterdir()}


def test_a_directory_that_cannot_be_read_asks_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_files, "INTERVAL", 0.0)
    (tmp_path / "file").touch()
    assert RequestFiles(tmp_path / "file").look() == (False, False)
    (tmp_path / "stop").mkdir()
    assert RequestFiles(tmp_path).look() == (False, False), "a directory was not made by touch"
    assert RequestFiles(tmp_path / ("x" * 300)).look() == (False, False)


def test_looks_are_a_second_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    files = RequestFiles(tmp_path)
    assert files.look() == (False, False)
    (tmp_path / "stop").touch()
    now = 100.9
    assert files.look() == (False, False)
    now = 101.0
    assert files.look() == (False, True)


def test_a_checkpoint_that_fails_leaves_the_file_to_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_files, "INTERVAL", 0.0)
    save = tmp_path / "save"
    save.touch()
    files = RequestFiles(tmp_path)
    assert files.look() == (True, False)
    files.saving(7)
    assert files.look() == (False, False), "asked for once, not at every step until the checkpoint is complete"
    files.complete(5)
    assert save.exists(), "an older checkpoint, which was being written when the file appeared"
    files.saving(9)  # that of step 7 has failed
    files.complete(9)
    assert not save.exists()
    save.touch()
    assert files.look() == (True, False)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.world
@pytest.mark.parametrize(
    "layout", [("parallel.zero_stage=1",), pytest.param(("parallel.pipeline=2", "model.layers=2"), id="pipeline", marks=pytest.mark.long)]
)
def test_all_ranks_save_and_stop_at_the_same_step(tokens: Path, tmp_path: Path, layout: tuple[str, ...]) -> None:
    more = ("training.steps=100000", "checkpoint.every=0", "training.micro_batch_size=2")
    settings = (*one_rank.TINY, f"data.tokens={tokens}", f"run_dir={tmp_path / 'run'}", *more, *layout)
    with open(tmp_path / "log", "wb") as output:
        ranks = start_ranks(2, *settings, output=output.fileno())
        try:
            metrics = tmp_path / "run" / "metrics.jsonl"
            wait_until(lambda: metrics.is_file() and metrics.stat().st_size > 0)
            (tmp_path / "run" / "save").touch()
            wait_until(lambda: not (tmp_path / "run" / "save").exists())
            (saved,) = checkpoints(tmp_path / "run")
            (tmp_path / "run" / "stop").touch()
            assert [rank.wait(300) for rank in ranks] == [75, 75]
        finally:
            for rank in ranks:
                rank.kill()
    last = list(one_rank.lines(tmp_path / "run"))[-1]
    assert checkpoints(tmp_path / "run") == [saved, last], "the run went on after the first one, and ended with the second one"
    assert not (tmp_path / "run" / "stop").exists()
    assert f"stopped after step {last}; the same command continues" in (tmp_path / "log").read_text()
