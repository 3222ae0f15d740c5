"""The next job of a chain is submitted beside the ranks: Slurm may be slow, or refuse it at first."""

from __future__ import annotations

import threading

import pytest

from pipeline.launch import chain
from pipeline.launch.chain import Chain


class Slurm:
    """Answers when it is told to, with a job or a refusal, and writes down what becomes of the job."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: bool) -> None:
        self.log: list[str] = []
        monkeypatch.setattr(chain.slurm, "move_dependents", lambda job, successor: self.log.append(f"{job} -> {successor}"))
        monkeypatch.setattr(chain.slurm, "cancel", lambda job: self.log.append(f"cancel {job}"))
        monkeypatch.setattr(chain.slurm, "set_excluded", lambda job, nodes: self.log.append(f"{job} without {' '.join(nodes)}"))
        self.recorded: list[str | None] = []
        self.asked, self.answer = threading.Semaphore(0), threading.Semaphore(0)
        self._answers = iter(answers)

    def submit(self) -> str | None:
        self.asked.release()
        self.answer.acquire()
        return "8" if next(self._answers) else None

    def chain(self) -> Chain:
        return Chain("7", self.submit, self.recorded.append)


def test_a_job_that_is_slow_to_be_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(monkeypatch, True)
    next_job = slurm.chain()
    slurm.asked.acquire()
    next_job.look()
    assert slurm.log == [], "the ranks run, and there is no job yet"
    slurm.answer.release()
    assert next_job.waits()
    assert next_job.hand_over(["n2"]) == "8"
    assert (slurm.log, slurm.recorded) == (["7 -> 8", "8 without n2"], ["8"])
    next_job.look()
    next_job.look()
    assert slurm.log[2:] == ["7 -> 8"], "the second look is too early"


def test_a_job_that_is_refused_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "_AGAIN", 0.01)
    slurm = Slurm(monkeypatch, False, False, True)
    for _ in range(3):
        slurm.answer.release()
    next_job = slurm.chain()
    for _ in range(3):
        slurm.asked.acquire()
    next_job.finish()
    assert (slurm.log, slurm.recorded) == (["8 -> 7", "cancel 8"], [None, "8"])


@pytest.mark.parametrize("last", [True, False])
def test_the_last_attempt_is_made_when_it_is_needed(monkeypatch: pytest.MonkeyPatch, last: bool) -> None:
    slurm = Slurm(monkeypatch, False, last)
    slurm.answer.release()
    next_job = slurm.chain()
    slurm.asked.acquire()
    slurm.answer.release()
    assert next_job.waits() is last
    assert slurm.recorded == [None, "8"][: 1 + last]


def test_a_canceled_run_leaves_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    slurm = Slurm(monkeypatch, True)
    next_job = slurm.chain()
    slurm.asked.acquire()
    next_job.cancel()
    slurm.answer.release()
    next_job.close()
    assert slurm.log == ["cancel 8"]
    assert not next_job.waits()
    next_job.look()
    next_job.finish()
    assert slurm.log == ["cancel 8"]
