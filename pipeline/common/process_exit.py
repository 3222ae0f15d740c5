"""How a process ends: with a recorded exit code, also when the reader of its output is gone, and without the interpreter's finalization."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

#: Exit code of a process that SIGPIPE ends.
CLOSED_PIPE = 141


def quiet(main: Callable[[], int]) -> int:
    """Call the main function of a program and return its exit code; CLOSED_PIPE if the reader of its output has gone."""
    try:
        code = main()
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        sys.stdout = None  # Python would flush it at its end, and fail once more
        return CLOSED_PIPE
    return code


def leave(code: int) -> NoReturn:
    """End the process with an exit code, whatever arrives in between.

    PyTorch's threads run until the process ends, also after destroy_process_group(), and while the interpreter is finalized one of them
    aborts now and then ("terminate called without an active exception"): Slurm then calls a finished job FAILED. A signal at that time does
    the same, since the interpreter has removed its handlers by then. So the handlers of atexit run, the
    streams are flushed, and the process leaves.
    """
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the reader closed the pipe
            code = code or 1
    os._exit(code)
