"""The ranks of a job as a step of srun: starts them, waits for their end, and tells how they ended.

srun alone would wait for a node that is lost until Slurm notices it, which takes minutes (SlurmdTimeout). So once a rank has recorded its
failure (common/ends.py), the step gets GRACE seconds to end by itself.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from pipeline.common import ends
from pipeline.common.ends import End
from pipeline.common.errors import CONTINUE, TERMINATED

log = logging.getLogger("pipeline")

#: Seconds between the first failure of a rank and the end of the step: the other ranks see that their peer has ended.
GRACE = 15.0
#: Seconds that srun gets to kill the tasks then.
TERMINATION = 5.0
#: Seconds between two looks at the step.
INTERVAL = 0.5
#: Most messages of srun that are kept: each task may have one.
_LINES = 10_000
#: Last lines of the ranks that are kept, and the first problem of the message of a UserError in them.
_SAID, _PROBLEM = 200, re.compile(r"^\d+ problems?:\n  - (.*)$", re.MULTILINE)
#: What srun prints of a task that a signal has ended, and the exit code that stands for it.
_SIGNALS = {"Killed": 137, "Out Of Memory": 137, "Segmentation fault": 139, "Bus error": 135, "Aborted": 134, "Terminated": 143}
_TASK = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<task>\d+)\S*: (?P<cause>[A-Z][\w ]*)")
#: What srun prints when a step is ended from outside.
_ABORTED = re.compile("forcing job termination|Timed out waiting for job step|Job step aborted|CANCELLED AT")
_CONTINUES = re.compile(rf"Exited with exit code {CONTINUE}$")
#: A shell starts each rank, so that a signal before Python has its handlers does not end the process.
SHELL = ("sh", "-c", 'trap "" USR1; exec "$@"', "sh")


@dataclass(frozen=True)
class StepEnd:
    """How the ranks ended.

    Attributes:
        code: exit code of the job, if this was its last step: that of the rank that failed first, else that of rank 0.
        first: the failure that the others follow, if one is known.
        started: seconds since 1970.
        ended: seconds since 1970.
    """

    code: int
    first: End | None
    started: float
    ended: float
    lines: list[str] = field(default_factory=list)


def run(command: Sequence[str], folder: Path | None, on_look: Callable[[subprocess.Popen[bytes]], None]) -> StepEnd:
    """Run the ranks and wait for their end.

    Args:
        command: of srun.
        folder: for the records of the ranks; None if none can be made.
        on_look: called every INTERVAL seconds with the process of srun; it may send signals, which srun passes on to the ranks.
    """
    environment = os.environ | ({} if folder is None else {ends.VARIABLE: str(folder)})
    started = time.time()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment)
    assert process.stderr is not None
    lines: list[str] = []
    said: deque[str] = deque(maxlen=_SAID)
    reader = threading.Thread(target=_forward, args=(process.stderr, lines, said), daemon=True)
    reader.start()
    _wait(process, folder, on_look)
    reader.join(timeout=10)  # a process that a rank left behind may keep the pipe open
    failures, rank_0 = ([], None) if folder is None else ends.read(folder)
    code, first = judge(process.returncode, failures, rank_0, lines)
    if code == 2 and first is None and (problem := _PROBLEM.search("\n".join(said))):  # a full disk: no rank could record why
        first = End(-1, "", time.time(), code, problem[1], final=True)
    return StepEnd(code, first, started, time.time(), lines)


def _wait(process: subprocess.Popen[bytes], folder: Path | None, on_look: Callable[[subprocess.Popen[bytes]], None]) -> None:
    """Wait for the end of srun; end it GRACE seconds after the first failure of a rank."""
    failed_at: float | None = None
    while True:
        try:
            process.wait(timeout=INTERVAL)
            return
        except subprocess.TimeoutExpired:
            on_look(process)
        if failed_at is None and folder is not None and ends.any_failed(folder):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > GRACE:
            log.warning("the step has not ended %.0f s after the first failure of a rank: it is terminated", GRACE)
            process.send_signal(signal.SIGTERM)  # srun kills all tasks that it reaches
            try:
                process.wait(timeout=TERMINATION)
            except subprocess.TimeoutExpired:  # it waits for a node that is lost
                process.kill()
                process.wait()
            return


def _forward(stream: BinaryIO, lines: list[str], said: deque[str]) -> None:
    """Copy standard error, whose last lines are kept, without the messages of srun and of the daemons of Slurm, which are kept, too."""
    for line in stream:
        if line.startswith((b"srun: ", b"slurmstepd")):
            if len(lines) < _LINES:
                lines.append(line.decode(errors="replace").rstrip())
        else:
            said.append(line.decode(errors="replace").rstrip())
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()


def judge(code: int, failures: Sequence[End], rank_0: End | None, lines: Sequence[str]) -> tuple[int, End | None]:
    """Return the exit code of the ranks and the failure that the others follow.

    A rank that is killed records nothing, and its peers record that they lost it: then the messages of srun name it.

    Args:
        code: exit code of srun, negative for a signal.
        failures: in the order of their records.
    """
    first = next((end for end in failures if not end.follows), None)
    if rank_0 is not None and rank_0.code == 0 and first is None:
        return 0, None  # rank 0 ends with 0 after all ranks have done their work
    if code == 0 and first is None and not failures:
        aborted = any(_ABORTED.search(line) for line in lines)  # srun exits with 0 when it leaves tasks behind that did not end
        return (TERMINATED if aborted else 0), None
    if first is not None:
        return first.code, first
    continues = any(_CONTINUES.search(line) for line in lines)  # a rank ended for the time limit, and srun ends the others by SIGTERM
    if rank_0 is not None and not failures:
        return (CONTINUE if continues and rank_0.code == TERMINATED else rank_0.code), None
    killed = _killed(lines)
    if killed is not None:
        return killed.code, killed
    if failures:
        return failures[0].code, failures[0]
    return (CONTINUE if continues and code == TERMINATED else 128 - code if code < 0 else code), None


def _killed(lines: Sequence[str]) -> End | None:
    """The first task that a signal ended; before the others if possible, which srun terminates."""
    tasks = [(match, number) for number, line in enumerate(lines) if (match := _TASK.match(line)) and match["cause"].strip() in _SIGNALS]
    others_end = next((number for number, line in enumerate(lines) if "Terminating StepId" in line), len(lines))
    early = [match for match, number in tasks if number < others_end]
    late = [match for match, number in tasks if number > others_end and match["cause"].strip() != "Terminated"]
    for match in (*early, *late):
        cause = match["cause"].strip()
        fix = " (of the host: use fewer ranks of a node, or set cluster.memory)" if cause == "Out Of Memory" else ""
        return End(int(match["task"]), match["host"], time.time(), _SIGNALS[cause], f"the process was ended by a signal: {cause}{fix}")
    return None
