"""Local ranks end with the process that started them."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from pipeline.certification.distributed import run_ranks
from tests.helpers import ROOT, environment

SECONDS = 120


def hold_lock(folder: str) -> None:
    """Run on each rank: hold a lock until the process ends."""
    with open(Path(folder, f"{dist.get_rank()}"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Path(folder, f"{dist.get_rank()}.held").touch()
        time.sleep(10 * SECONDS)


def start(folder: str) -> None:
    run_ranks(2, hold_lock, folder)


@pytest.mark.long
def test_a_killed_parent_leaves_no_ranks(tmp_path: Path) -> None:
    code = f"from tests.certification.test_distributed import start; start({str(tmp_path)!r})"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment())
    deadline = time.monotonic() + SECONDS
    while len(list(tmp_path.glob("*.held"))) < 2:
        assert parent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for rank in range(2):
        with open(tmp_path / f"{rank}", "w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    assert time.monotonic() < deadline, f"rank {rank} still runs"
                    time.sleep(0.1)
