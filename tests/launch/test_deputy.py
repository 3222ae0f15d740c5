"""The deputy of a supervisor: it tells the end of a job from the loss of its first node."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from pipeline.common import events
from pipeline.launch import deputy


def test_a_supervisor_that_ends_is_not_lost(tmp_path):
    watched = deputy.Deputy("1", tmp_path)
    found = []
    listening = threading.Thread(target=lambda: found.append(deputy.listen("127.0.0.1", watched.port)))
    listening.start()
    while not watched.has_connection():
        pass
    watched.close()
    listening.join()
    assert found == [True]


def test_a_supervisor_that_is_silent_is_lost():
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, and says nothing
        port = server.getsockname()[1]
        assert not deputy.listen("127.0.0.1", port, silence=0.3)
    assert not deputy.listen("127.0.0.1", port, silence=0.3)


@pytest.mark.parametrize(
    "requeue, next_job, refusal, actions, commands",
    [
        (1, None, 0, ["requeue"], ["requeue 7"]),
        (1, None, 1, ["end"], ["requeue 7", "cancel 7"]),
        (0, None, 0, ["end"], ["cancel 7"]),
        (0, "8", 0, ["chain"], ["cancel 7"]),
    ],
)
def test_a_job_without_its_first_node_does_not_hold_the_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    requeue: int,
    next_job: str | None,
    refusal: int,
    actions: list[str],
    commands: list[str],
) -> None:
    """Slurm is two scripts, which answer and record what they are asked for."""
    script = f"""#!/bin/sh
    case "$1" in
      show) echo "JobId=7 JobState=RUNNING Restarts=0 Requeue={requeue}" ;;
      requeue) echo "requeue $2" >> {tmp_path}/asked; exit {refusal} ;;
    esac
    """
    for name, text in (("scontrol", script), ("scancel", f'#!/bin/sh\necho "cancel $1" >> {tmp_path}/asked\n')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(deputy, "listen", lambda *_: False)
    events.record(tmp_path, "chain", next=next_job)
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM)}
    try:
        code = deputy.main("7", "n1", "1", str(tmp_path))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert code == int(actions != ["requeue"])
    assert [event["action"] for event in events.read(tmp_path) if event["event"] == "action"] == actions
    assert (tmp_path / "asked").read_text().split("\n")[: len(commands)] == commands
