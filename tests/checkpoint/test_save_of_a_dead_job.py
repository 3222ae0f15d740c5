"""The writer process of a job that was killed, and the job that waits for it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint import catalog
from pipeline.common import locks, signals
from pipeline.common.errors import ToBeContinued, UserError
from tests.checkpoint.async_runs import Run


def _train_and_die(run_dir: str, pipe: Any) -> None:
    """Hand a checkpoint over, and die before it is written."""
    with locks.claimed(Path(run_dir), "run_dir") as lock:
        run = Run(Path(run_dir), lock)
        run.update()
        os.kill(run.process.pid, signal.SIGSTOP)
        run.begin()
        run.update()
        while run.saver._snapshot is None and run.saver._staging._thread.is_alive():
            time.sleep(0.01)
        pipe.send(run.process.pid)
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_writer_finishes_what_a_killed_rank_handed_over_and_the_next_job_waits_for_it(tmp_path, caplog):
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    rank = context.Process(target=_train_and_die, args=(str(tmp_path), theirs))
    rank.start()
    writer = ours.recv()
    rank.join(60)
    threading.Timer(0.3, os.kill, (writer, signal.SIGCONT)).start()
    with locks.claimed(tmp_path, "run_dir"):
        assert catalog.read(tmp_path).complete == [1]
    assert "waiting until its last checkpoint is written" in caplog.text


@pytest.fixture
def last_write(tmp_path, monkeypatch):
    """A process that writes the last checkpoint of a dead job, and does not end."""
    monkeypatch.setattr(signals, "received", set())
    with locks.claimed(tmp_path, "run_dir") as lock, subprocess.Popen(["sleep", "1000"], pass_fds=[lock]) as process:
        locks.note_last_write(lock)
        yield process
        process.kill()


@pytest.mark.usefixtures("last_write")
def test_a_job_that_waits_for_the_last_checkpoint_of_a_dead_one_ends_in_time(tmp_path):
    named = rf"still held after 0.005 minutes \(training.timeout_minutes\): .*, process \d+ on {socket.gethostname()}"
    with pytest.raises(UserError, match=named), locks.claimed(tmp_path, "run_dir", minutes=0.005):
        pass


@pytest.mark.usefixtures("last_write")
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGUSR1, 75)])
def test_a_job_that_waits_for_the_last_checkpoint_of_a_dead_one_reacts_to_signals(tmp_path, number, code):
    before = signal.getsignal(number)
    signals.record(number)
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    try:
        with pytest.raises(ToBeContinued) as stopped, locks.claimed(tmp_path, "run_dir", minutes=1):
            pass
    finally:
        signal.signal(number, before)
    assert stopped.value.code == code


def test_a_running_job_is_not_waited_for(tmp_path):
    refused = pytest.raises(UserError, match="is being written by another job")
    with locks.claimed(tmp_path, "run_dir"), refused, locks.claimed(tmp_path, "run_dir"):
        pass
