"""Files that stay open for the passes of stage=shard, as many as the system allows."""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from pathlib import Path

RESERVED = 64
"""Descriptors that are left for everything else: outputs, logs, MPI."""


class OpenFiles:
    """Keeps files open for reading. Beyond the limit of the process the file that was not used for the longest time is closed.

    Args:
        limit: number of files; default: the hard limit of the process, to which its soft limit is raised, without RESERVED.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit or most_open_files()
        self._open: OrderedDict[Path, int] = OrderedDict()

    def descriptor(self, path: Path) -> int:
        """The descriptor of a file, valid until the next call."""
        if path in self._open:
            self._open.move_to_end(path)
        else:
            if len(self._open) >= self._limit:
                os.close(self._open.popitem(last=False)[1])
            self._open[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._open[path]

    def close(self) -> None:
        """Close all files."""
        while self._open:
            os.close(self._open.popitem()[1])


def most_open_files() -> int:
    """The number of files that this process can keep open; raises its soft limit to the hard limit, at most 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(1, (wanted if soft == resource.RLIM_INFINITY else soft) - RESERVED)
