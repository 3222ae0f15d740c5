"""The supervisor of a job between a Slurm that answers late, or not, and ranks that a script plays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.common import ends, events, locks
from pipeline.common.errors import UserError
from pipeline.launch import allocation, chain, rank_step, recovery, slurm
from pipeline.launch.allocation import Allocation
from pipeline.launch.placement import Placement
from tests.helpers import ROOT, environment
from tests.world import configured

FOUR = "\n".join(f"n{number} idle" for number in range(1, 5))


class Commands:
    """A folder with commands of Slurm, each a line of shell; `asked` has the calls that they note."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, folder / "asked"

    def write(self, **lines: str) -> None:
        for name, line in lines.items():
            (self.folder / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {self.asked}\n{line}\n')
            (self.folder / name).chmod(0o755)

    def calls(self) -> list[str]:
        return self.asked.read_text().splitlines() if self.asked.exists() else []


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return Commands(tmp_path / "bin")


def supervised(commands: Commands, run: Path, *, python: str = "", code: int, nodes: str = "n1") -> str:
    """Run slurm/pretrain.sbatch as job 7; returns standard error."""
    own = {
        "PATH": f"{commands.folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_TASKS_PER_NODE": f"1(x{nodes.count(',') + 1})",
        "SLURM_JOB_NODELIST": nodes,
        "PIPELINE_SLURM": str(ROOT / "slurm"),
        **({"PIPELINE_PYTHON": python} if python else {}),
    }
    words = ["bash", str(ROOT / "slurm/pretrain.sbatch"), "model=llama-tiny", f"run_dir={run}", "training.global_batch_size=8"]
    done = subprocess.run([*words, "training.micro_batch_size=1"], cwd=run.parent, env=environment(**own), capture_output=True, timeout=90)
    assert done.returncode == code, done.stderr.decode()
    return done.stderr.decode()


def actions(run: Path) -> list[dict[str, Any]]:
    return [event for event in events.read(run) if event["event"] in ("action", "requeue_asked", "limit")]


def test_preemption_is_asked_for_at_the_signal_and_a_refusal_is_recorded(commands: Commands, tmp_path: Path) -> None:
    fields = "JobId=7 JobState=RUNNING Requeue=1 Restarts=0 PreemptTime=2026-11-26T20:00:00"
    commands.write(
        scontrol=f'[ "$1" = requeue ] && {{ echo no >&2; exit 1; }}; [ -e {tmp_path}/told ] && sleep 2; echo "{fields}"',
        srun=f"touch {tmp_path}/told $PIPELINE_ENDS/told-to-end; sleep 1.5; echo 'srun ends' >> {commands.asked}; exit 143",
    )
    supervised(commands, tmp_path / "run", code=143)
    calls = [call for call in commands.calls() if not call.startswith("srun --")]
    assert calls == ["scontrol show job 7", "scontrol show job 7", "srun ends", "scontrol requeue 7"]
    asked, action = actions(tmp_path / "run")
    assert (asked["event"], asked["reason"]) == ("requeue_asked", "preempted")
    assert (action["action"], action["reason"]) == ("end", "preempted; not requeued: scontrol requeue: no")


def test_a_node_that_slurm_gives_up_while_the_nodes_are_asked_is_no_cancellation(commands: Commands, tmp_path: Path) -> None:
    """Slurm puts the job back into the queue, and ends its script by SIGTERM, between the first answer and the decision."""
    told = tmp_path / "told"
    commands.write(
        scontrol=f'[ -e {told} ] && restarts=1 || restarts=0; echo "JobId=7 JobState=RUNNING Requeue=1 Restarts=$restarts"',
        srun=f'case "$*" in *answers*) touch {told}; kill -TERM $PPID; sleep 1; echo answers n1;; *) exit 137;; esac',
    )
    supervised(commands, tmp_path / "run", code=143, nodes="n1,n2")
    (action,) = actions(tmp_path / "run")
    assert (action["action"], action["reason"]) == ("requeued", "Slurm has put the job back into the queue")


def test_an_extended_time_limit_is_read(commands: Commands, tmp_path: Path) -> None:
    """The ranks would be asked for a checkpoint 30 s before the first end. What a rank of a canceled job wrote last is removed."""
    left = tmp_path / "run" / ".job-5-0-ranks-0"
    left.mkdir(parents=True)
    (left / "rank-0.json").write_text("{}")
    second = datetime.fromtimestamp(time.time() + 900).isoformat(timespec="seconds")
    first = "$(date -d '+28 seconds' +%FT%T)"  # of the first question
    commands.write(
        scontrol=f'[ -e {tmp_path}/begun ] && end={second} || end={first}; echo "JobId=7 JobState=RUNNING EndTime=$end"',
        srun=f'touch {tmp_path}/begun; trap "touch {tmp_path}/asked" USR1; for n in $(seq 20); do sleep 0.1; done; exit 0',
    )
    supervised(commands, tmp_path / "run", code=0)
    assert not (tmp_path / "asked").exists()
    assert not left.exists()
    limit, action = actions(tmp_path / "run")
    assert limit["limit"] == datetime.fromisoformat(second).timestamp()
    assert action["code"] == 0


def test_a_supervisor_that_is_killed_goes_back_to_the_queue(commands: Commands, tmp_path: Path) -> None:
    commands.write(scontrol="exit 1")
    (tmp_path / "python").write_text(f'#!/bin/bash\n[ "$1" = -c ] && exec {sys.executable} "$@"\nkill -9 $$\n')
    (tmp_path / "python").chmod(0o755)
    said = supervised(commands, tmp_path / "run", python=str(tmp_path / "python"), code=137)
    assert commands.calls() == ["scontrol requeue 7"]
    assert "the supervisor of the ranks was killed: job 7 goes back to the queue" in said


def test_a_full_disk_is_told_from_refused_settings(tmp_path: Path) -> None:
    """No rank could record why it ended: what they printed tells it."""
    reason = "run_dir=/scratch/run: cannot be written: No space left on device"
    ended = rank_step.run(["sh", "-c", f"printf '1 problem:\\n  - {reason}\\n    fix: free\\n' >&2; exit 2"], tmp_path, lambda _: None)
    assert ended.first is not None
    assert (ended.code, ended.first.reason, ended.first.final) == (2, reason, True)


def test_a_controller_that_does_not_answer_is_waited_for(commands: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_PAUSE", 0.0)
    silent = (
        f"[ $(grep -c . {commands.asked}) -gt 2 ] || {{ echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1; }}"
    )
    commands.write(scontrol=f"{silent}; echo JobState=RUNNING")
    assert slurm.facts("7", patience=60) == {"JobState": "RUNNING"}
    commands.write(scontrol="echo 'Invalid job id specified' >&2; exit 1")
    assert slurm.facts("7", patience=60) == {}


@pytest.mark.parametrize(("answering", "lost"), [("", ()), ("n1", ("n2", "n3")), ("n1 n3", ("n2",)), ("n1 n2 n3", ())])
def test_no_node_is_lost_if_slurm_starts_no_step(commands: Commands, answering: str, lost: tuple[str, ...]) -> None:
    commands.write(srun=f"for node in {answering}; do echo answers $node; done")
    placement = Placement(["stage=pretrain"], None, Allocation("7", 0, ("n1", "n2", "n3"), 1))
    assert placement.lost(["n1", "n2"]) == lost


@pytest.mark.parametrize(
    ("listed", "failed", "age", "fewest", "excluded"),
    [
        ("(null)", ["n2"], 0, 3, ["n2"]),
        ("(null)", ["n2"], 0, 4, []),  # the job could not start without it
        ("n2", ["n2"], 25, 3, []),  # after 24 hours
        ("n2,n4", ["n2"], 25, 2, ["n4"]),  # the user's own stays
        ("n[3-4]", ["n2"], 0, 1, ["n2", "n3", "n4"]),
        ("n4", ["n2"], 0, 3, ["n4"]),
        ("n4", [], 0, 4, ["n4"]),
    ],
)
def test_an_exclusion_ends(
    commands: Commands, tmp_path: Path, listed: str, failed: list[str], age: float, fewest: int, excluded: list[str]
) -> None:
    commands.write(sinfo=f"echo '{FOUR}'")
    noted = {node: {"reason": "killed", "time": time.time() - 3600 * age} for node in failed}
    (tmp_path / allocation.EXCLUDED).write_text(json.dumps(noted))
    assert allocation.excluded_in_queue(tmp_path, {"ExcNodeList": listed, "Partition": "batch"}, fewest) == excluded


def test_refused_settings_are_no_failures_of_a_run(tmp_path: Path) -> None:
    for code in (137, 2, 2, 1):
        events.record(tmp_path, "ranks_end", code=code, failed=True, progress=False)
    assert recovery.failures_in_a_row(tmp_path) == 2


def test_a_job_without_the_lock_writes_nothing(commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock of another supervisor, or that of ranks that were started by hand; not that of this job before it was requeued."""
    run = tmp_path / "run"
    commands.write(scontrol="echo JobId=7 JobState=RUNNING", srun="exit 0")
    for file in (locks.OF_JOB, locks.FILE):
        with locks.claimed(run, "run_dir", file=file):
            (run / "stop").touch()
            said = supervised(commands, run, code=2)
        assert "is being written by another job: job without a scheduler" in said
        assert sorted(path.name for path in run.iterdir()) == ["stop"]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with locks.claimed(run, "run_dir"):
        with pytest.raises(UserError):
            locks.refuse_held(run, "run_dir")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        locks.refuse_held(run, "run_dir")


SHOWN = """\
JobId=7 JobName=my job
   UserId=me(1) GroupId=me(1) Nice=50 Account=(null) QOS=normal Requeue=0 TimeLimit=00:10:00 TimeMin=N/A
   ReqNodeList=(null) ExcNodeList=n4 NumNodes=1 ReqB:S:C:T=0:0:*:1 CoreSpec=* MinTmpDiskNode=0
   Features=(null) OverSubscribe={shared} Contiguous=1 Licenses=(null) Network=(null)
   Comment=two words, Requeue=1
   StdErr=/scratch/my logs/7
   StdOut=/scratch/my logs/7
   {resources}
   MailUser=a@b.c MailType=END,FAIL
"""
KEPT = ["--time=00:10:00", "--output=/scratch/my logs/7", "--nice=50", "--exclude=n4", "--comment=two words, Requeue=1", "--contiguous"]
KEPT += ["--mail-user=a@b.c", "--mail-type=END,FAIL", "--threads-per-core=1", "--no-requeue", "--dependency=afterany:7"]


@pytest.mark.parametrize(
    ("shared", "resources", "own"),
    [
        ("NO", "TresPerNode=gres:gpu:2", ["--exclusive", "--gres=gpu:2"]),
        ("OK", "TresPerNode=gres/gpu:a100:2,gres/nvme:1", ["--gres=gpu:a100:2,nvme:1"]),
        (
            "USER",
            "TresPerJob=gres:gpu:8 CpusPerTres=gres:gpu:4 MemPerTres=gres:gpu:100",
            ["--exclusive=user", "--gpus=8", "--cpus-per-gpu=4"],
        ),
        ("YES", "TresPerTask=cpu=2,gres/gpu=1", ["--oversubscribe", "--gpus-per-task=1"]),
    ],
)
def test_the_next_job_of_a_chain_has_the_options_of_this_one(shared: str, resources: str, own: list[str]) -> None:
    fields = slurm.parse_facts(SHOWN.format(shared=shared, resources=resources))
    variables = {"SLURM_JOB_NAME": "my job", "SLURM_GPUS_PER_NODE": "2"}
    found = chain.options(configured("stage=pretrain"), Allocation("7", 0, ("n1",), 1), fields, variables)
    assert set(found) >= {*KEPT, *own, "--job-name=my job"}
    assert not [option for option in found if option.endswith(("(null)", "N/A", "=*", "=0", "="))]
    assert ("--gpus-per-node=2" in found) == ("TresPerNode" not in resources)
    assert ends.VARIABLE not in os.environ
