"""The next job of a chain is submitted beside the ranks: Slurm may be slow, or refuse it at first."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from pipeline.launch import chain
from pipeline.launch.chain import Chain, NextJob


class Job(NextJob):
    """A next job that writes down what becomes of it."""

    def __init__(self, log: list[str]) -> None:
        super().__init__("7", "8")
        self._log = log

    def look(self) -> None:
        self._log.append("look")

    def finish(self) -> None:
        self._log.append("finish")

    def cancel(self) -> None:
        self._log.append("cancel")

    def hand_over(self, exclude: Sequence[str]) -> None:
        self._log.append(f"hand over without {' '.join(exclude)}")


class Slurm:
    """Answers when it is told to, with a job or a refusal."""

    def __init__(self, *answers: bool) -> None:
        self.log: list[str] = []
        self.recorded: list[str | None] = []
        self.asked, self.answer = threading.Semaphore(0), threading.Semaphore(0)
        self._answers = iter(answers)

    def submit(self) -> NextJob | None:
        self.asked.release()
        self.answer.acquire()
        return Job(self.log) if next(self._answers) else None

    def chain(self) -> Chain:
        return Chain(self.submit, self.recorded.append)


def test_a_job_that_is_slow_to_be_submitted() -> None:
    slurm = Slurm(True)
    found = slurm.chain()
    slurm.asked.acquire()
    found.look()
    assert slurm.log == [], "the ranks run, and there is no job yet"
    slurm.answer.release()
    assert found.waits()
    assert found.hand_over(["n2"]) == "8"
    assert (slurm.log, slurm.recorded) == (["hand over without n2"], ["8"])


def test_a_job_that_is_refused_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "_AGAIN", 0.01)
    slurm = Slurm(False, False, True)
    for _ in range(3):
        slurm.answer.release()
    found = slurm.chain()
    for _ in range(3):
        slurm.asked.acquire()
    found.finish()
    assert (slurm.log, slurm.recorded) == (["finish"], [None, "8"])


@pytest.mark.parametrize("last", [True, False])
def test_the_last_attempt_is_made_when_it_is_needed(last: bool) -> None:
    slurm = Slurm(False, last)
    slurm.answer.release()
    found = slurm.chain()
    slurm.asked.acquire()
    slurm.answer.release()
    assert found.waits() is last
    assert slurm.recorded == [None, "8"][: 1 + last]


def test_a_canceled_run_leaves_no_job() -> None:
    slurm = Slurm(True)
    found = slurm.chain()
    slurm.asked.acquire()
    found.cancel()
    slurm.answer.release()
    found.close()
    assert slurm.log == ["cancel"]
    assert not found.waits()
    found.look()
    found.finish()
    assert slurm.log == ["cancel"]
