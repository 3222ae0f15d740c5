"""Commands of the pipeline, run from a given source tree, in processes forked from this one, which has imported all libraries.

This process must not have imported the package `pipeline`: a forked one imports it from its own tree.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from tools.faults.job import free_port

#: Libraries that the stages import, and that take seconds.
LIBRARIES = ("torch", "torch.distributed.pipelining", "hydra._internal.hydra", "omegaconf", "tokenizers", "deepspeed")
#: The variables of every process.
VARIABLES = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
#: Seconds for which the other ranks may go on after one has ended with an error.
GRACE = 5.0


def preload() -> None:
    os.environ.update(VARIABLES)
    for name in LIBRARIES:
        import_module(name)
    assert "pipeline" not in sys.modules, "a fork would not import the package from its own tree"


def run(tree: Path, arguments: Sequence[str], ranks: int, output: Path, seconds: float) -> int:
    """Run `python -m pipeline ARGUMENTS` on ranks of this machine, to the end.

    Args:
        tree: the source tree.
        arguments: of the command.
        ranks: how many processes; 1 starts one without the variables of a launcher.
        output: file that both streams are appended to.
        seconds: time limit.

    Returns:
        The exit code; that of the first rank with an error; 124 after the time limit.
    """
    job: dict[str, str] = {}
    if ranks > 1:
        job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "none"}
        job |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    places = [job | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}) for rank in range(ranks)]
    return _wait([_fork(lambda: _be_command(list(arguments)), tree, place, output) for place in places], seconds)


def call(tree: Path, function: Callable[[], None], output: Path, seconds: float = 300) -> int:
    """Run a function, which imports the package from the tree, in a forked process; returns its exit code."""
    return _wait([_fork(function, tree, {}, output)], seconds)


def _fork(function: Callable[[], None], tree: Path, variables: dict[str, str], output: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)  # a command's own processes end with it
        stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update({**variables, "PYTHONPATH": str(tree)})
        os.chdir(tree)
        sys.path[0] = str(tree)
        function()
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if code and not isinstance(left.code, int):
            print(left.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    _leave(code)
    raise AssertionError("not reached")


def _leave(code: int) -> None:
    """End this process as the interpreter would, but with the exit handlers of the forked part only."""
    import atexit
    import threading

    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined] # threads of the command
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


def _be_command(arguments: list[str]) -> None:
    import runpy

    sys.argv = ["pipeline", *arguments]
    runpy.run_module("pipeline", run_name="__main__", alter_sys=True)


def _wait(pids: list[int], seconds: float) -> int:
    """Wait for processes. When one has failed, the others are killed after a while."""
    deadline, codes = time.monotonic() + seconds, dict.fromkeys(pids, -1)
    code, open_pids = 0, list(pids)
    while open_pids:
        for pid in list(open_pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                open_pids.remove(pid)
                codes[pid] = os.waitstatus_to_exitcode(status)
                if codes[pid] and not code:
                    code, deadline = codes[pid], min(deadline, time.monotonic() + GRACE)
        if open_pids and time.monotonic() > deadline:
            code = code or 124
            for pid in open_pids:
                _kill_group(pid)
            deadline = time.monotonic() + 60
        time.sleep(0.02)
    for pid in pids:
        _kill_group(pid)
    return code


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
