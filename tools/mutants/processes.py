"""Commands of the pipeline, run from a given source tree, in processes forked from this one, which has imported all libraries.

This process must not have imported the package `pipeline`: a forked one imports it from its own tree.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.process import BaseProcess
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
    return _wait([_start(lambda: _be_command(list(arguments)), tree, place, output) for place in places], seconds)


def call(tree: Path, function: Callable[[], None], output: Path, seconds: float = 300) -> int:
    """Run a function, which imports the package from the tree, in a forked process; returns its exit code."""
    return _wait([_start(function, tree, {}, output)], seconds)


def _start(function: Callable[[], None], tree: Path, variables: dict[str, str], output: Path) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=_be_child, args=(function, tree, variables, output))
    process.start()
    return process


def _be_child(function: Callable[[], None], tree: Path, variables: dict[str, str], output: Path) -> None:
    atexit._clear()  # handlers of the parent
    os.setpgid(0, 0)  # a command's own processes end with it
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    os.environ.update({**variables, "PYTHONPATH": str(tree)})
    os.chdir(tree)
    sys.path[0] = str(tree)
    try:
        function()
    finally:
        atexit._run_exitfuncs()


def _be_command(arguments: list[str]) -> None:
    import runpy

    sys.argv = ["pipeline", *arguments]
    runpy.run_module("pipeline", run_name="__main__", alter_sys=True)


def _wait(processes: list[BaseProcess], seconds: float) -> int:
    """Wait for processes. When one has failed, the others are killed after a while."""
    code, deadline = 0, time.monotonic() + seconds
    while any(process.is_alive() for process in processes):
        if not code and (code := next((process.exitcode for process in processes if process.exitcode), 0)):
            deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            code, deadline = code or 124, time.monotonic() + 60
            _kill(processes)
        time.sleep(0.02)
    _kill(processes)
    return code or next((process.exitcode for process in processes if process.exitcode), 0)


def _kill(processes: list[BaseProcess]) -> None:
    """Kill the process groups: what the processes have started may still be alive."""
    for process in processes:
        assert process.pid is not None, "it was started"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
