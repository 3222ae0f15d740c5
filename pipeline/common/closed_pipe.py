"""Output that nobody reads any more, as in `tools/status runs | head`: the process ends quietly."""

from __future__ import annotations

import sys
from collections.abc import Callable

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
