"""What a run does with the outcomes of its checkpoints: failures are counted, and end it only in a row or at its end."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.checkpoint.native import TrainState
from pipeline.checkpoint.saver import SaveOutcome, Saver, SaveRequest
from pipeline.common import artifact
from pipeline.common.errors import UserError
from pipeline.parallel import mesh as meshes
from pipeline.training import run_directory
from pipeline.training.callback import Decision
from pipeline.training.checkpoint_hooks import CheckpointHooks
from pipeline.training.saves import Saves
from tests.world import configured, queued


class Scripted(Saver):
    """A saver whose saves end as the test says, one after the other: "" for a complete checkpoint, else the reason of the failure."""

    def __init__(self, events: list[str], outcomes: list[str]) -> None:
        self.events, self._outcomes = events, outcomes
        self._ended: list[SaveOutcome] = []
        self._copies = False

    def begin(self, request: SaveRequest) -> None:
        self.events.append(f"begin {request.step}")
        self._copies = True
        reason = self._outcomes.pop(0) if self._outcomes else ""
        weight = "norm.weight" if "not finite" in reason else ""
        folder = None if reason else Path(f"step-{request.step:08d}")
        self._ended.append(SaveOutcome(request.step, folder, reason, weight))

    def holds_weights(self) -> bool:
        return self._copies

    def before_update(self) -> None:
        self.events.append("released")
        self._copies = False

    def poll(self) -> list[SaveOutcome]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self) -> None:
        if self._copies:
            self.before_update()

    def wait_for_commit(self) -> None:
        pass

    def abandon(self, reason: str) -> None:
        self.events.append(f"abandon: {reason}")

    def close(self) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def group():
    meshes.init_distributed(0, 1, 0, "")
    yield
    meshes.destroy_process_group()


class Run:
    """A run of one rank, with a scripted saver."""

    def __init__(self, *outcomes: str, minutes: float = 0.0) -> None:
        self.events: list[str] = []
        self.gone = False
        settings = ("checkpoint.max_failures=3", f"checkpoint.failing_minutes={minutes}", "run_dir=runs/never")
        config = configured("stage=pretrain", "model=gpt-tiny", *settings)
        counters = torch.tensor([5.0, 0.0, 0.0], dtype=torch.float64)
        engine = SimpleNamespace(counters=lambda: counters, fragments=list)
        trainer: Any = SimpleNamespace(mesh=SimpleNamespace(rank=0), engine=engine)
        metrics: Any = SimpleNamespace(flush=lambda: self.events.append("flush"), check_file=self._check_file)
        watchdog: Any = SimpleNamespace(report=lambda *_: None)
        hooks = CheckpointHooks(writes=lambda step: step % 2 == 0, written=lambda: self.events.append("written"))
        data: Any = SimpleNamespace()
        self.saver = Scripted(self.events, list(outcomes))
        self.complete: list[int] = []
        self.saves = Saves(config, trainer, data, metrics, watchdog, hooks, self.saver, on_complete=self.complete.append)

    def _check_file(self) -> None:
        if self.gone:
            raise UserError.of("run_dir", "runs/never", "was removed", "move it back")

    def step(self, number: int) -> None:
        """A step, as the loop makes it, with a checkpoint after it."""
        requests = self.saves.requests()
        step = queued(number, decision=Decision(failed="failed" in requests, fatal="fatal" in requests))
        self.saves.before_update()
        self.saves.after_step(step)
        self.saves.save(step)


def test_failures_are_counted_and_logged_and_training_goes_on(caplog):
    run = Run("disk full", "quota", "", "disk full", "disk full", "")
    for number in range(1, 9):
        run.step(number)
    assert run.saves.failures == 4
    assert "step 2: the checkpoint could not be written (failure 2 in a row, checkpoint.max_failures=3): quota" in caplog.text
    assert "failure 3 in a row" not in caplog.text


def test_failures_in_a_row_end_the_run_with_the_reason():
    run = Run("disk full", "disk full", "no space for the index")
    for number in range(1, 5):
        run.step(number)
    with pytest.raises(UserError) as raised:
        run.step(5)
    assert "checkpoint.max_failures=3: 3 checkpoints in a row could not be written, the last one: no space for the index" in str(
        raised.value
    )


def test_a_disk_that_is_full_for_a_moment_does_not_end_a_fast_run():
    run = Run(*["No space left on device"] * 8, "", minutes=10.0)
    for number in range(1, 11):
        run.step(number)
    assert (run.saves.failures, run.complete) == (8, [9])


def test_a_disk_that_stays_full_ends_the_run_in_the_end(monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr("pipeline.training.saves.time", SimpleNamespace(monotonic=lambda: seconds[0]))
    run = Run(*["No space left on device"] * 8, minutes=10.0)
    for number in range(1, 7):
        seconds[0] += 150
        run.step(number)
    with pytest.raises(UserError, match="5 checkpoints in a row could not be written"):
        run.step(7)


@pytest.mark.parametrize(
    "reason, fix",
    [
        ("No space left on device", "free disk space"),
        ("Permission denied", "write permission"),
        ("Read-only file system", "write permission"),
    ],
)
def test_the_fix_is_that_of_the_reason(reason: str, fix: str):
    run = Run(*[reason] * 3)
    for number in range(1, 5):
        run.step(number)
    with pytest.raises(UserError, match=f"fix: .*{fix}"):
        run.step(5)


def test_the_last_checkpoint_is_tried_several_times(caplog, monkeypatch):
    monkeypatch.setattr("pipeline.training.saves.LAST_WAITS", (0.0,))
    run = Run("disk full")
    run.saves.begin(TrainState(7, 70))
    assert run.saves.finish(TrainState(7, 70)) == TrainState(7, 70, 5)
    assert "trying once more" in caplog.text
    run = Run("disk full", "quota exceeded")
    run.saves.begin(TrainState(7))
    with pytest.raises(UserError, match="the checkpoint could not be written: quota exceeded"):
        run.saves.finish(TrainState(7))


def test_weights_that_are_not_finite_end_the_run():
    run = Run("it is not finite")
    run.step(1)
    run.step(2)
    with pytest.raises(
        UserError, match=r"weights after step=1: norm.weight contains values that are not finite; no checkpoint was written"
    ):
        run.step(3)
    run = Run("it is not finite")
    run.saves.begin(TrainState(4))
    with pytest.raises(UserError, match="not finite"):
        run.saves.finish(TrainState(4))
    assert run.events.count("begin 4") == 1, "it is not tried again"


def test_what_follows_a_checkpoint_waits_until_it_is_complete():
    run = Run("", "disk full", "")
    run.saves.begin(TrainState(2))
    assert "written" not in run.events
    run.saves.poll()
    run.saves.begin(TrainState(4))  # fails
    run.saves.poll()
    run.saves.begin(TrainState(5))  # of no evaluation
    run.saves.poll()
    assert run.events.count("written") == 1


def test_a_checkpoint_is_released_after_the_metrics_of_its_steps():
    run = Run()
    run.saves.before_update()
    assert "flush" not in run.events, "only a save flushes"
    run.saves.begin(TrainState(1))
    run.saves.before_update()
    assert run.events[-3:] == ["begin 1", "flush", "released"]
    run.saves.begin(TrainState(2))
    run.saves.finish(TrainState(2))
    assert run.events.index("flush", run.events.index("begin 2")) < len(run.events) - 1 - run.events[::-1].index("released")


def test_nothing_is_saved_once_the_run_directory_is_gone():
    run = Run()
    run.gone = True
    run.step(1)
    assert "begin 1" not in run.events
    with pytest.raises(UserError, match="was removed"):
        run.step(2)


def test_a_part_of_another_rank_that_failed_gives_up_the_checkpoint():
    run = Run()
    run.saves.after_step(queued(1, decision=Decision(failed=True)))
    assert any(event.startswith("abandon: a rank could not write its part") for event in run.events)


def test_the_manifest_is_written_when_a_full_disk_has_space_again(tmp_path, monkeypatch, caplog):
    write, failures = artifact.write, [OSError(errno.ENOSPC, "No space left on device", "manifest.json")]

    def fail_once(folder: Path, manifest: artifact.Manifest) -> None:
        if failures:
            raise failures.pop()
        write(folder, manifest)

    monkeypatch.setattr(artifact, "write", fail_once)
    monkeypatch.setattr(run_directory, "LAST_WAITS", (0.0,))
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "loss": 2.5}\n')
    run_directory.finish(configured(f"run_dir={tmp_path}"), TrainState(7, 70), ["n1"], None)
    assert "manifest.json: cannot be written (No space left on device): trying once more in 0 s" in caplog.text
    assert artifact.read(tmp_path, key="run_dir", stage="pretrain").totals["loss"] == 2.5
