"""A rank that has finished leaves with its exit code, whatever signal arrives, although threads of PyTorch still run."""

import subprocess
import sys

import pytest

from tests.helpers import ROOT

#: Forks ENDS processes one after the other, of which each is a rank of one with gloo's threads and has the handlers of a training run.
#: Each gets a signal at another moment around its end. Prints the exit statuses that differ from the code that was left with.
ENDS = """
import os, random, signal, sys, tempfile, time
import torch.distributed as dist
from datetime import timedelta
from pipeline.common import process_exit, signals

def rank(pipe, code):
    signals.record(signal.SIGUSR1)
    signals.record(signal.SIGTERM)
    store = dist.FileStore(tempfile.mktemp(), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store, timeout=timedelta(seconds=30))
    dist.barrier()
    dist.destroy_process_group()
    os.write(pipe, b"finished")
    END

random.seed(0)
wrong = {}
for number in range(ENDS):
    reader, pipe = os.pipe()
    code = random.choice([0, 75])
    child = os.fork()
    if child == 0:
        try:
            rank(pipe, code)
        finally:
            os._exit(99)
    os.read(reader, 8)
    time.sleep(random.random() * 0.02)
    os.kill(child, random.choice([signal.SIGUSR1, signal.SIGTERM, 0]))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != code:
        wrong[number] = (code, status)
    os.close(reader), os.close(pipe)
print(wrong)
"""


def ends(count: int, end: str) -> str:
    program = ENDS.replace("range(ENDS)", f"range({count})").replace("END\n", f"{end}\n")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.long)])
def test_ranks_leave_with_their_code_although_signals_arrive(count: int) -> None:
    assert ends(count, "process_exit.leave(code)") == "{}"
