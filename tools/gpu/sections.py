"""Runs the sections of tools/gpu_check, each in a process of its own.

An error of a kernel leaves a process unable to use its GPU, and a kernel may never return. So a section ends alone, with a failed row.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipeline.launch import site
from tools.gpu.rows import Row, Setup, as_json, from_json

#: Section -> its module, whose function `rows` yields the rows. In the order of the table.
SECTIONS = {
    "environment": "tools.gpu.environment",
    "kernels": "tools.gpu.kernels",
    "models": "tools.gpu.models",
    "step": "tools.gpu.step",
    "speed": "tools.gpu.speed",
    "ranks": "tools.gpu.ranks",
}
#: Name of the row that tells how a section ended that did not reach its end.
ENDED = "the section itself"


def run(name: str, command: list[str], log: Path, seconds: float, about: dict[str, str]) -> Iterator[Row]:
    """Run a section in a child process, and yield its rows as they come.

    Args:
        name: of the section.
        command: of the child, without the file descriptor that it writes its rows to, which is appended.
        log: file of both output streams of the child.
        seconds: time limit.
        about: receives what the child tells of the machine.
    """
    reader, writer = os.pipe()
    environment = dict(os.environ)
    site.add(environment, site.DEFAULTS | site.NVIDIA_DEFAULTS)  # as a job of the launch profile has them on a GPU
    with log.open("wb") as output:
        child = subprocess.Popen(
            [*command, str(writer)], pass_fds=(writer,), stdout=output, stderr=output, env=environment, start_new_session=True
        )
    os.close(writer)
    late = threading.Event()

    def stop() -> None:
        late.set()
        _kill(child)

    timer = threading.Timer(seconds, stop)
    timer.start()
    last = "no row"
    try:
        with os.fdopen(reader) as lines:
            for line in lines:
                content = json.loads(line)
                if "name" not in content:
                    about |= content
                    continue
                row = replace(from_json(content), section=name)
                last = row.name
                yield row
        code = child.wait()
    finally:
        timer.cancel()
        _kill(child)
    why = ""
    if late.is_set():
        why = f"did not end within {seconds:g} s, after: {last}; see {log}"
    elif code:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        why = f"{how} after: {last}: {_last_line(log)}; see {log}"
    if why:
        yield replace(Row.failed(ENDED, why), section=name)


def serve(name: str, setup: Setup, descriptor: int) -> None:
    """Be the child process: write the rows of a section to a file descriptor, one line of JSON each."""
    rows: Callable[[Setup], Iterator[Row]] = importlib.import_module(SECTIONS[name]).rows
    with os.fdopen(descriptor, "w", buffering=1) as lines:
        lines.write(json.dumps({"device": setup.described()}) + "\n")
        for row in rows(setup):
            lines.write(json.dumps(as_json(row)) + "\n")


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Kill a child process and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _last_line(log: Path) -> str:
    """The last line of a log, which names the error of a Python process."""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"
