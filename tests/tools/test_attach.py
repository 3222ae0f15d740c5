"""tools/attach: the stacks of ranks of a run on this machine; tests/launch/test_stop_jobs.py has those of a Slurm job."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers import environment, torchrun
from tests.tools.test_status import tool
from tests.training.test_endings import arguments, wait_for_step

pytestmark = [pytest.mark.world, pytest.mark.long]


@pytest.fixture
def trained(tokens: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Trains for long on a number of ranks, below tmp_path; the runs are ended after the test."""
    processes = []

    def start(ranks: int, name: str = "run") -> subprocess.Popen[bytes]:
        run = tmp_path / f"{name}-{ranks}"
        words = [sys.executable, "-m", "pipeline", *arguments(tokens, run, "training.steps=100000", "checkpoint.every=0")]
        command = [*torchrun(ranks, cold=True), *words] if ranks > 1 else words
        with open(tmp_path / f"log-{ranks}", "wb") as log:
            processes.append(subprocess.Popen(command, env=environment(), stdout=log, stderr=log, stdin=subprocess.DEVNULL))
        wait_for_step(run, 2)
        return processes[-1]

    yield start
    for process in processes:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def test_ranks_on_this_machine(trained: Callable[..., subprocess.Popen[bytes]], tmp_path: Path) -> None:
    trained(2)
    alone = trained(1)
    trained(1, "other")
    printed = tool("attach", tmp_path / "run-2", "--rank", 1, 0)
    first, second = printed.split("rank 0: process ")
    assert first.startswith("rank 1: process ")
    for stacks in (first, second):
        assert "loop.py" in stacks
        assert "watchdog.py" in stacks, "a thread besides the main one"
    rank = int(re.findall(r"process (\d+)", first)[0])
    os.kill(rank, signal.SIGSTOP)
    assert f"it is suspended, and prints its stacks when it goes on: kill -CONT {rank}" in tool("attach", tmp_path / "run-2", "--rank", 1)
    os.kill(rank, signal.SIGCONT)
    refused = tool("attach", tmp_path / "run-2", "--rank", 2, expect=2)
    assert "--rank 2: " in refused
    assert "has no such process on this machine" in refused
    assert ", but ranks 0, 1; the run is running" in refused
    printed = tool("attach", tmp_path / "run-1", expect=1)
    assert printed.startswith(f"rank 0: process {alone.pid} on "), "not the other run, which this process has started, too"
    assert "no stacks: py-spy is not installed" in printed
    time.sleep(0.5)
    assert alone.poll() is None, "a process that does not handle the signal gets none"


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    assert "is no run directory" in tool("attach", tmp_path, expect=2)
