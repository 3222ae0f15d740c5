"""What follows the end of the ranks: decisions, exit codes, and what is read from srun."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path

import pytest

from pipeline.common import git_commit
from pipeline.common.ends import End
from pipeline.launch import rank_step, slurm, submission
from pipeline.launch.recovery import ActionKind, Situation, decide
from pipeline.preflight import file_system

ERROR = End(3, "n2", 0.0, 1, "ValueError: x", "loop.py:3")
LOST_PEER = End(0, "n1", 0.0, 1, "RuntimeError: Connection closed by peer", follows=True)
KILLED = End(3, "n2", 0.0, 137, "the process was ended by a signal: Killed")
MISTAKE = End(0, "n1", 0.0, 2, "training.steps=0: must be at least 1", final=True)
ECC = End(3, "n2", 0.0, 1, "RuntimeError: CUDA error: uncorrectable ECC error encountered", hardware=True)
SUSPENDED = End(3, "n2", 0.0, 1, "no progress for 90 s in phase 'start': its process does not respond: suspended or dead", silent=True)
PORT = End(0, "n1", 0.0, 1, "DistNetworkError: Address already in use", start=True)


@pytest.mark.parametrize(
    "now, kind, code, exclude",
    [
        (Situation(0), ActionKind.END, 0, ()),
        (Situation(75, progress=True, stopped=True), ActionKind.END, 75, ()),
        (Situation(75, progress=True, stopped=True, chain=True), ActionKind.END, 75, ()),
        (Situation(75, progress=True, stopped=True, preempted=True), ActionKind.END, 75, ()),
        (Situation(75, progress=True, stopped=True, phase=8, has_phase=True), ActionKind.END, 75, ()),
        (Situation(137, KILLED, progress=True, stopped=True), ActionKind.END, 75, ()),  # killed after its checkpoint was complete
        (Situation(75, progress=True), ActionKind.REQUEUE, 75, ()),
        (Situation(75, progress=True, chain=True), ActionKind.CHAIN, 0, ()),
        (Situation(75, progress=True, can_requeue=False), ActionKind.END, 75, ()),
        (Situation(75, failures=3), ActionKind.END, 1, ()),
        (Situation(143), ActionKind.END, 143, ()),
        (Situation(137, KILLED, progress=True, canceled=True), ActionKind.END, 143, ()),
        (Situation(75, progress=True, canceled=True), ActionKind.REQUEUE, 75, ()),
        (Situation(143, preempted=True), ActionKind.REQUEUE, 143, ()),
        (Situation(137, KILLED, preempted=True), ActionKind.REQUEUE, 137, ()),
        (Situation(143, requeued=True, canceled=True, chain=True), ActionKind.REQUEUED, 143, ()),
        (Situation(2, MISTAKE, progress=True), ActionKind.END, 2, ()),
        (Situation(2, progress=True), ActionKind.END, 2, ()),  # the disk is full: the ranks could not record their mistake
        (Situation(1, ERROR), ActionKind.END, 1, ()),  # before any checkpoint: the next attempt would end in the same way
        (Situation(1, ERROR, progress=True, nodes=1, needed=2), ActionKind.RESTART, 1, ()),
        (Situation(1, ERROR, progress=True, failures=3, nodes=1, needed=2), ActionKind.END, 1, ()),
        (Situation(1, PORT, nodes=1, needed=2), ActionKind.RESTART, 1, ()),
        (Situation(137, KILLED, nodes=1, needed=2), ActionKind.RESTART, 137, ()),
        (Situation(137, KILLED, nodes=2, needed=2), ActionKind.RESTART, 137, ("n2",)),
        (Situation(137, KILLED, nodes=1, needed=2, blamed_before=("n2",)), ActionKind.REQUEUE, 137, ("n2",)),
        (Situation(1, SUSPENDED, nodes=1, needed=2), ActionKind.RESTART, 1, ()),
        (Situation(1, SUSPENDED, nodes=2, needed=2), ActionKind.RESTART, 1, ("n2",)),
        (Situation(1, ECC, nodes=1, needed=2), ActionKind.REQUEUE, 1, ("n2",)),
        (Situation(1, ECC, nodes=2, needed=2), ActionKind.RESTART, 1, ("n2",)),
        (Situation(1, LOST_PEER, lost=("n2",), nodes=1, needed=2), ActionKind.REQUEUE, 1, ("n2",)),
        (Situation(1, LOST_PEER, lost=("n2",), nodes=1, needed=2, chain=True), ActionKind.CHAIN, 0, ("n2",)),
        (Situation(1, LOST_PEER, lost=("n2",), nodes=1, needed=2, can_requeue=False), ActionKind.END, 1, ("n2",)),
        (Situation(1, LOST_PEER, lost=("n2",), nodes=2, needed=2), ActionKind.RESTART, 1, ("n2",)),
        (Situation(1, LOST_PEER, lost=("n2",), nodes=2, needed=2, seconds_left=60), ActionKind.REQUEUE, 1, ("n2",)),
        (Situation(1, LOST_PEER, nodes=2, needed=2), ActionKind.RESTART, 1, ()),
        (Situation(1, LOST_PEER, lost=("n2",), nodes=3, needed=4, fewest=2), ActionKind.RESTART, 1, ("n2",)),
        (Situation(1, LOST_PEER, lost=("n2", "n3", "n4"), nodes=1, needed=4, fewest=2), ActionKind.REQUEUE, 1, ("n2", "n3", "n4")),
        (Situation(137, KILLED, nodes=3, needed=4, fewest=2), ActionKind.RESTART, 137, ()),  # once may be chance
        (Situation(75, progress=True, phase=8), ActionKind.REQUEUE, 75, ()),
        (Situation(75, progress=True, phase=8, chain=True), ActionKind.CHAIN, 0, ()),
        (Situation(75, progress=True, phase=8, has_phase=True), ActionKind.RESTART, 75, ()),
    ],
)
def test_decisions(now: Situation, kind: ActionKind, code: int, exclude: tuple[str, ...]) -> None:
    action = decide(now)
    assert (action.kind, action.code, action.exclude) == (kind, code, exclude)
    assert action.reason


def test_a_broken_job_does_not_restart_for_ever() -> None:
    for end in (ERROR, KILLED, ECC, PORT, LOST_PEER, None):
        now = Situation(1, end, nodes=4, needed=2, failures=3)
        assert decide(now).kind is ActionKind.END
        assert decide(dataclasses.replace(now, chain=True)).kind is ActionKind.END


LINES = [
    "srun: error: n2: task 1: Killed",
    "srun: launch/slurm: _step_signal: Terminating StepId=7.2",
    "slurmstepd-n1: error: *** STEP 7.2 ON n1 CANCELLED AT 2026-11-23T18:41:48 ***",
    "srun: error: n1: task 0: Terminated",
]
LATE = ["srun: error: n1: task 0: Exited with exit code 1", *LINES[1:2], "srun: error: n2: task 1: Killed"]


@pytest.mark.parametrize(
    "code, failures, rank_0, lines, expected",
    [
        (0, [], None, [], (0, None, None)),
        (0, [], None, ["srun: forcing job termination", "srun: error: Timed out waiting for job step to complete"], (143, None, None)),
        (0, [], End(0, "n1", 0.0, 0, ""), ["srun: forcing job termination"], (0, None, None)),
        (143, [], None, LINES, (137, 1, "n2")),
        (1, [LOST_PEER], LOST_PEER, LATE, (137, 1, "n2")),
        (1, [LOST_PEER, ERROR], LOST_PEER, LINES, (1, 3, "n2")),
        (137, [ERROR, LOST_PEER], LOST_PEER, [], (1, 3, "n2")),
        (143, [], End(0, "n1", 0.0, 75, ""), LINES[1:], (75, None, None)),
        (143, [], End(0, "n1", 0.0, 0, ""), LINES[1:], (0, None, None)),
        (2, [MISTAKE], MISTAKE, [], (2, 0, "n1")),
        (1, [LOST_PEER], LOST_PEER, [], (1, 0, "n1")),
        (-9, [], None, [], (137, None, None)),
        (12, [], None, ["srun: error: tasks 0-7: Exited with exit code 12"], (12, None, None)),
        (75, [], End(0, "n1", 0.0, 143, ""), ["srun: error: n2: task 1: Exited with exit code 75", *LINES[1:2]], (75, None, None)),
        (143, [], None, ["srun: error: n2: task 1: Exited with exit code 75", *LINES[1:]], (75, None, None)),
        (143, [], End(0, "n1", 0.0, 143, ""), ["srun: error: n2: task 1: Exited with exit code 143"], (143, None, None)),
    ],
)
def test_the_exit_code_is_that_of_the_first_failure(
    code: int, failures: list[End], rank_0: End | None, lines: list[str], expected: tuple[int, int | None, str | None]
) -> None:
    found, first = rank_step.judge(code, failures, rank_0, lines)
    assert (found, None if first is None else first.rank, None if first is None else first.host) == expected


def test_what_slurm_does_with_a_job() -> None:
    assert slurm.is_requeued({"Restarts": "2"}, 1)
    assert not slurm.is_requeued({"Restarts": "1"}, 1)
    assert not slurm.is_requeued({}, 0)
    assert slurm.is_out_of_time({"Reason": "TimeLimit"})
    assert not slurm.is_out_of_time({"Reason": "None"})


def test_a_rank_that_the_host_kills_says_which_key_to_set() -> None:
    _, first = rank_step.judge(137, [], None, ["srun: error: n2: task 1: Out Of Memory"])
    assert first is not None
    assert "Out Of Memory" in first.reason
    assert "cluster.memory" in first.reason


def test_fields_of_a_job() -> None:
    fields = slurm.parse_facts(
        "JobId=7 JobName=a=b Requeue=0 EndTime=2027-11-23T18:41:41 PreemptTime=2026-11-23T18:56:04 CPUs/Task=1 Power="
    )
    assert (fields["JobId"], fields["Requeue"], fields["CPUs/Task"]) == ("7", "0", "1")
    assert slurm.is_preempted(fields)
    assert not slurm.is_preempted({"PreemptTime": "None"})
    assert not slurm.is_preempted({})


def test_a_byte_that_is_no_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Latin-1 byte in the name of a job of someone, in what any of these commands print."""
    for name in ("scontrol", "squeue", "srun", "sbatch", "quota"):
        (tmp_path / name).write_text("#!/bin/sh\nprintf 'answers n1 5* \\374ber\\nJobState=RUNNING'\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert slurm.facts("7")["JobState"] == "RUNNING"
    assert slurm.command(["squeue"]).startswith("answers n1 5* \ufffdber")
    assert slurm.answering(["n1"]) == set()
    assert submission.run("#!/bin/sh\n# \udcfc", []).startswith("answers n1")
    assert file_system.exceeded_quotas(tmp_path)[0] == "answers n1 5* \ufffdber"


def test_the_commit_of_a_clone_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clone = tmp_path / "clone"
    (clone / "pipeline").mkdir(parents=True)
    monkeypatch.setattr(git_commit, "PACKAGE", clone / "pipeline")
    git = ["git", "-C", str(clone), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    if os.geteuid() == 0:
        for path in (clone, *clone.rglob("*")):
            os.chown(path, 65534, 65534)
    git_commit.git.cache_clear()
    assert len(git_commit.commit() or "") == 40
    git_commit.git.cache_clear()
    (clone / ".git/HEAD").unlink()
    assert git_commit.commit() is git_commit.commit() is None
    assert [message.partition(": ")[0] for message in caplog.messages] == [f"the commit and the changes of {clone} are not recorded"]
    git_commit.git.cache_clear()
