"""events.jsonl of a run directory: one line for every start, end and decision in the life of a run, from all of its jobs."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

log = logging.getLogger("pipeline")

FILE = "events.jsonl"


def record(run_dir: Path, event: str, **fields: Any) -> None:
    """Append an event, with the time in seconds since 1970 and the id of this job (null outside of Slurm).

    A line is one write of O_APPEND, so that the lines of several processes do not mix. An event that cannot be written is logged and
    never ends the run.

    Args:
        run_dir: run directory, which exists.
        event: what happened, for example run_start.
        fields: more about it; values that JSON can hold.
    """
    line = json.dumps({"time": round(time.time(), 3), "event": event, "job": os.environ.get("SLURM_JOB_ID"), **fields}) + "\n"
    try:
        handle = os.open(run_dir / FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":  # a process was killed while it wrote its line
                line = "\n" + line
            os.write(handle, line.encode())
        finally:
            os.close(handle)
    except OSError as error:
        log.warning("%s: the event %s was not recorded: %s", run_dir / FILE, event, error.strerror)


def read(run_dir: Path) -> list[dict[str, Any]]:
    """Return the events in the order of their lines, without damaged lines; empty if there is no file."""
    path = run_dir / FILE
    events = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            content = json.loads(line)
        except ValueError:  # a part of a line
            continue
        if isinstance(content, dict) and "event" in content:
            events.append(content)
    return events
