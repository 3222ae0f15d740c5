"""`touch RUN/stop` ends a job for good: on the dev cluster, with the next job of a chain, and with a job that Slurm could requeue."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.checkpoint import native
from pipeline.common import events
from pipeline.launch import slurm as commands
from tests.launch.test_slurm_jobs import MODEL, command, ended, sbatch, slurm, training_steps  # noqa: F401 - a fixture
from tests.tools.test_status import tool

pytestmark = [pytest.mark.slurm, pytest.mark.long]

TRAINING = (
    *("training.steps=100000", "optimizer.warmup_steps=1", "training.global_batch_size=8", "training.micro_batch_size=2"),
    *("training.sequence_length=32", "training.validation_batches=1", "checkpoint.every=0", "parallel.pipeline=2", "cluster=devcluster"),
)


KEPT = ("TresPerNode", "OverSubscribe", "Nice", "MailType", "MailUser", "Comment", "TimeLimit", "StdOut", "Partition", "ExcNodeList")


def wait_until(condition: Callable[[], bool], log: Path) -> None:
    for _ in range(2400):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(log.read_text())


@pytest.mark.parametrize("continuation", ["chain", "requeue"])
def test_a_stopped_job_is_not_continued(tokens: Path, tmp_path: Path, continuation: str) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    words = (*MODEL, *TRAINING, f"data.tokens={tokens}", f"run_dir={run}", f"cluster.continuation={continuation}")
    more = ("--gres=gpu:1", "--exclusive", "--nice=50", "--mail-type=END,FAIL", "--mail-user=a@b.c", "--comment=two words", "--time=30")
    number = sbatch(log, "--nodes=2", "--ntasks-per-node=1", "--requeue", *more, "slurm/pretrain.sbatch", *words)
    wait_until(lambda: (run / "metrics.jsonl").is_file() and bool(training_steps(run)), log)
    if continuation == "chain":
        wait_until(lambda: any(event["event"] == "chain" for event in events.read(run)), log)
        successor = str([event["next"] for event in events.read(run) if event["event"] == "chain"][-1])
        shown = [commands.parse_facts(command("scontrol", "show", "job", job)) for job in (str(number), successor)]
        assert [{name: fields.get(name) for name in KEPT} for fields in shown] == [{name: shown[0][name] for name in KEPT}] * 2
        second = sbatch(tmp_path / "second", "--nodes=2", "--ntasks-per-node=1", "slurm/pretrain.sbatch", *words)
        before = [event["job"] for event in events.read(run)]
        assert ended(second)["ExitCode"] == "2:0"
        assert f"run_dir={run}: is being written by another job: job {number}, " in (tmp_path / "second").read_text()
        assert {*before, *(event["job"] for event in events.read(run))} == {str(number)}, "the refused job leaves no event"
    if continuation == "requeue":
        printed = tool("attach", run, "--rank", 0, 1)
        assert set(re.findall(r"^rank (\d): process", printed, re.MULTILINE)) == {"0", "1"}
        assert printed.count("loop.py") >= 2, printed
        assert "no such process on job" in tool("attach", run, "--rank", 2, expect=2)
    (run / "stop").touch()
    facts = ended(number)
    assert (facts["JobState"], facts["ExitCode"], facts["Restarts"]) == ("FAILED", "75:0", "0"), log.read_text()
    action = events.read(run)[-1]
    assert (action["event"], action["action"], action["code"]) == ("action", "end", 75)
    assert native.step_of(native.complete(run)[-1]) == training_steps(run)[-1]["step"]
    assert not (run / "stop").exists()
    successors = [event["next"] for event in events.read(run) if event["event"] == "chain"]
    assert len(successors) == (continuation == "chain")
    assert all(ended(int(successor))["JobState"] == "CANCELLED" for successor in successors)
    assert command("squeue", "--noheader") == ""
