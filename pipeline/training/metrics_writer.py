"""Appends lines to metrics.jsonl, also while the disk is full for some time, and removes those that a run begins without."""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from pathlib import Path

from pipeline.common.atomic_files import atomic_file

log = logging.getLogger("pipeline")


class MetricsWriter:
    """Appends lines to a file, which may be a new one. Lines that cannot be written are kept in memory and written with the next ones.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._handle = path, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._waiting = bytearray()
        self._reason = ""

    def write(self, line: str = "") -> None:
        """Append a line, which has no line break, after the lines that are waiting; without one, write those that are waiting."""
        self._waiting += f"{line}\n".encode() if line else b""
        try:
            while self._waiting:  # a full disk may take a part of a line; the next write goes on there
                del self._waiting[: os.write(self._handle, self._waiting)]
        except OSError as error:
            if not self._reason:
                text = "%s: cannot be written (%s); its lines are kept in memory and written when this is possible again"
                log.warning(text, self._path, error.strerror)
            self._reason = error.strerror or str(error)
            return
        if self._reason:
            log.info("%s: is written again, without a gap", self._path)
        self._reason = ""

    def stat(self) -> os.stat_result:
        """The status of the open file."""
        return os.fstat(self._handle)

    def close(self) -> None:
        """Write the lines that are waiting, and close the file. Lines that still cannot be written are lost, which is logged."""
        self.write()
        if self._waiting:
            log.warning("%s: the last %d lines were not written: %s", self._path, self._waiting.count(b"\n"), self._reason)
        with suppress(OSError):  # a network file system may report a full disk here
            os.close(self._handle)


def keep_steps(path: Path, first: int, last: int) -> None:
    """Remove the lines of other steps than `first` to `last`, and an incomplete last line. Other damaged lines are kept.

    Args:
        first: first step of this run directory: a fork begins after the step of the checkpoint that it continues.
        last: the step that the run continues from. Lines after it were written by a run that was interrupted.

    Raises:
        OSError: the file cannot be read or replaced.
    """
    if not path.is_file():
        return
    lines = path.read_bytes().split(b"\n")
    incomplete = lines.pop()
    steps = [step_of(line) for line in lines]
    kept = [line for line, step in zip(lines, steps, strict=True) if step is None or first <= step <= last]
    if None in steps:
        log.warning("%s: line %d is not a JSON object with a step; it is kept", path, steps.index(None) + 1)
    if incomplete or kept != lines:
        with atomic_file(path) as handle:
            handle.writelines(line + b"\n" for line in kept)


def last_loss(path: Path, step: int) -> float | None:
    """The loss of a step; None if it is not there."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return next((json.loads(line)["loss"] for line in reversed(lines) if step_of(line) == step and b'"loss"' in line), None)


def step_of(line: bytes) -> int | None:
    """The step of a line, None if it cannot be read."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return None
