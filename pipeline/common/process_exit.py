"""How a process ends: with a recorded exit code, and without the finalization of the interpreter."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from typing import NoReturn


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
