"""The preflight of jobs on the dev cluster: nodes with a fault that is really there."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipeline.common import events
from tests.launch.test_slurm_jobs import DEVCLUSTER, ended, sbatch, slurm  # noqa: F401 - the cluster of the tests

pytestmark = pytest.mark.slurm

#: The nodes share the cores of this machine: what they measure differs.
SETTINGS = ("cluster=devcluster", "cluster.slow_factor=100")


def preflight(log: Path, run: Path, *settings: str) -> tuple[str, str, dict]:
    """Run slurm/preflight.sbatch on four nodes; its exit code, its log and the event."""
    size = ("--nodes=4", "--ntasks-per-node=1", "--no-kill")
    number = sbatch(log, *size, "slurm/preflight.sbatch", f"run_dir={run}", *SETTINGS, *settings)
    code = ended(number)["ExitCode"]
    text = log.read_text()
    recorded = [event for event in events.read(run) if event["event"] == "preflight"]
    assert len(recorded) == 1, text
    assert "Traceback" not in text
    return code, text, recorded[0]


@contextmanager
def host_name(node: str, name: str) -> Iterator[None]:
    """Give a node of the cluster another host name: that of its namespace."""
    base = Path(os.environ["SLURM_CONF"]).parent
    enter = ["nsenter", "--target", (base / f"run/slurmd.{node}.pid").read_text().strip(), "--uts", "hostname"]
    subprocess.run([*enter, name], check=True)
    try:
        yield
    finally:
        subprocess.run([*enter, node], check=True)


#: Imported by every Python at its start: a rank of one node suspends itself as soon as its result file names a phase.
SUSPENDING = """
import importlib.util, os, signal, sys

NAME = "pipeline.preflight.node_result"


class Suspending:
    def find_spec(self, name, path, target=None):
        if name != NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            write = module.write

            def suspend(folder, result):
                write(folder, result)
                if result["phase"] == PHASE:
                    os.kill(os.getpid(), signal.SIGSTOP)

            module.write = suspend

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("SLURMD_NODENAME") == NODE and os.environ.get("SLURM_STEP_ID", "").isdigit():
    sys.meta_path.insert(0, Suspending())
"""


@pytest.mark.long
def test_a_node_with_a_wrong_host_name_is_left_out(tmp_path: Path) -> None:
    with host_name("n3", "wrong.invalid"):
        code, text, event = preflight(tmp_path / "log", tmp_path / "run")
    assert code == "1:0"
    assert list(event["bad"]) == ["n3"], event["bad"]
    assert "its host name wrong.invalid is not resolved" in event["bad"]["n3"]
    assert (event["nodes"], event["steps"]) == (4, 1)
    assert {line.split()[0] for line in text.splitlines() if " all-reduce between " in line} == {"n1", "n2", "n3", "n4"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("node", "phase", "steps", "reason"),
    [
        ("n3", "started", 2, "did not get beyond 'started', as others did"),  # the others have a store, and wait for it there
        ("n1", "local", 6, "fails the preflight also without any other node"),  # which has the store: all, four parts, the rest
    ],
)
def test_a_rank_that_is_suspended(node: str, phase: str, steps: int, reason: str, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"NODE, PHASE = {node!r}, {phase!r}\n{SUSPENDING}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, text, event = preflight(tmp_path / "log", tmp_path / "run", "cluster.preflight_seconds=30")
    assert code == "1:0"
    assert list(event["bad"]) == [node], text
    assert event["bad"][node].startswith(reason)
    assert event["steps"] == steps, text


@pytest.mark.long
def test_a_node_that_is_lost_is_found(tmp_path: Path) -> None:
    """The job has the node already; its slurmd is gone."""
    run, go = tmp_path / "run", tmp_path / "go"
    wait = f"until [ -e {go} ]; do sleep 0.1; done; bash slurm/preflight.sbatch run_dir={run} {' '.join(SETTINGS)}"
    number = sbatch(tmp_path / "log", "--nodes=4", "--ntasks-per-node=1", "--no-kill", f"--wrap={wait}")
    while (
        "JobState=RUNNING"
        not in subprocess.run(["scontrol", "show", "job", str(number)], capture_output=True, text=True, check=True).stdout
    ):
        time.sleep(0.2)
    subprocess.run([DEVCLUSTER, "kill", "n4"], check=True)
    try:
        go.touch()
        ended(number)
    finally:
        subprocess.run([DEVCLUSTER, "revive", "n4"], check=True)
    text = (tmp_path / "log").read_text()
    assert "preflight: 1 of 4 nodes bad: n4: " in text


@pytest.mark.long
def test_a_promise_that_no_node_keeps_ends_the_job(tmp_path: Path) -> None:
    """More GPUs than there are is a mistake of the command."""
    code, text, event = preflight(tmp_path / "log", tmp_path / "run", "cluster.gpus_per_node=2")
    assert code == "2:0"
    assert "cluster.gpus_per_node=2: preflight: 'GPUs' fails on 4 of 4 nodes: has 0 GPUs, not 2" in text
    assert "request the GPUs of the job" in text
    assert "error" in event
