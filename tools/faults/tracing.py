"""Traces the lines of a process of a job, reports them to tools/chaos_checkpoint or tools/chaos, and stops at the line of a fault.

The pipeline knows nothing of this: `sys.settrace` calls back for every line of the files below. A process that reaches the line of its
fault waits for the answer of the tool, which meanwhile kills this process or others, or does something else to the job.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2]) + os.sep

#: Moment -> files whose lines belong to it. The files of a moment that a rank executes before its first step belong to "starting".
MOMENTS = {
    "staging": (
        "pipeline/checkpoint/staging.py",
        "pipeline/checkpoint/async_save.py",
        "pipeline/checkpoint/writer_process.py",
        "pipeline/checkpoint/writer_process.py",
        "pipeline/training/saves.py",
    ),
    "writing": (
        "pipeline/checkpoint/attempt.py",
        "pipeline/checkpoint/writer.py",
        "pipeline/checkpoint/data_file.py",
        "pipeline/checkpoint/records.py",
        "pipeline/checkpoint/staged_file.py",
        "pipeline/checkpoint/save.py",
        "pipeline/checkpoint/saver.py",
    ),
    "committing": (
        "pipeline/checkpoint/attempt.py",
        "pipeline/checkpoint/commit.py",
        "pipeline/checkpoint/catalog.py",
        "pipeline/common/atomic_files.py",
        "pipeline/common/locks.py",
    ),
    "training": ("pipeline/training/loop.py", "pipeline/training/trainer.py", "pipeline/training/step_control.py"),
    "starting": (
        "pipeline/training/run_directory.py",
        "pipeline/training/resume.py",
        "pipeline/training/choose_saver.py",
        "pipeline/checkpoint/load_any_layout.py",
        "pipeline/checkpoint/reader.py",
    ),
}
MOMENT_OF = {file: moment for moment, files in MOMENTS.items() for file in files}
#: Further files that are traced.
MORE = (
    "pipeline/training/native_engine.py",
    "pipeline/training/validation.py",
    "pipeline/training/run.py",
    "pipeline/common/artifact.py",
    "pipeline/common/process_exit.py",
    "pipeline/parallel/mesh.py",
)
#: The phases of a process.
STARTING, TRAINING, FINISHING, LEAVING = "starting", "training", "finishing", "leaving"
#: (file, function, event of sys.settrace) -> the phase that begins there. "leaving" begins after the manifest.
PHASES = {
    ("pipeline/training/trainer.py", "train", "call"): TRAINING,
    ("pipeline/checkpoint/writer.py", "hand_over", "call"): TRAINING,
    ("pipeline/training/saves.py", "finish", "call"): FINISHING,
    ("pipeline/training/run_directory.py", "finish", "return"): LEAVING,
}
#: The function whose first return is reported: a step is trained.
STEP = ("pipeline/training/trainer.py", "train", "return")


class Tracer:
    """Counts the lines that this process executes, and stops at one of them.

    Args:
        role: "rank 0", "rank 1", ... or "writer".
        name: of the tool's socket.
        fault: {"role", "file", "line", "phase", "count"}: where to stop; None for nowhere.
    """

    def __init__(self, role: str, name: str, fault: dict[str, Any] | None) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(f"\0{name}")
        self._answers = self._socket.makefile("r")
        self._lock = threading.Lock()
        self._phase = STARTING
        self._stepped = False
        self._files: dict[CodeType, str | None] = {}
        self._counts: dict[tuple[str, int, str], int] = {}
        own = fault is not None and fault["role"] == role
        self._fault = (fault["file"], fault["line"], fault["phase"]) if fault is not None and own else None
        self._stop_at = fault["count"] if fault is not None else 0
        slurm = {name: os.environ.get(f"SLURM_{name.upper()}", "") for name in ("job_id", "step_id")}
        self._send({"role": role, "pid": os.getpid(), "node": socket.gethostname(), **slurm})

    def call(self, frame: FrameType, _event: str, _argument: object) -> Any:
        """Trace the lines of a function if it is in one of the files (the protocol of sys.settrace)."""
        code = frame.f_code
        if code not in self._files:
            name = code.co_filename.removeprefix(ROOT)
            self._files[code] = name if (name in MOMENT_OF or name in MORE) and code.co_name != "<module>" else None
        file = self._files[code]
        if file is None:
            return None
        self._phase = PHASES.get((file, code.co_name, "call"), self._phase)
        return self.line

    def line(self, frame: FrameType, event: str, _argument: object) -> Any:
        """Count a line; stop at that of the fault."""
        file = self._files[frame.f_code] or ""
        if event == "return":
            where = (file, frame.f_code.co_name, event)
            self._phase = PHASES.get(where, self._phase)
            if where == STEP and not self._stepped:
                self._stepped = True
                self._send({"stepped": True})
        if event == "line":
            key = (file, frame.f_lineno, self._phase)
            self._counts[key] = count = self._counts.get(key, 0) + 1
            if count == 1:
                self._send({"line": key, "function": frame.f_code.co_name})
            if key == self._fault and count == self._stop_at:
                self._stop(key, frame.f_code.co_name)
        return self.line

    def _stop(self, key: tuple[str, int, str], function: str) -> None:
        """Report the fault's line and wait until the tool answers; meanwhile report signals that the pipeline records."""
        with self._lock, suppress(OSError):
            self._say({"landed": key, "function": function, "fault": os.environ["CHAOS_FAULT"]})
            received: set[int] = set()
            while not select.select([self._socket], [], [], 0.05)[0]:
                signals = sys.modules.get("pipeline.common.signals")
                if signals is not None and signals.received > received:
                    received = set(signals.received)
                    self._say({"received": sorted(received)})
            self._answers.readline()

    def report_counts(self) -> None:
        """Send how often each line was executed."""
        sys.settrace(None)
        self._send({"counts": [[*key, count] for key, count in self._counts.items()]})

    def _send(self, message: dict[str, Any]) -> None:
        with self._lock, suppress(OSError):  # the tool has ended
            self._say(message)

    def _say(self, message: dict[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")


def install(role: str) -> None:
    """Trace this process from now on; the environment has the tool's socket and the fault."""
    tracer = Tracer(role, os.environ["CHAOS_SOCKET"], json.loads(os.environ.get("CHAOS_FAULT", "null")))
    atexit.register(tracer.report_counts)
    threading.settrace(tracer.call)
    sys.settrace(tracer.call)


def run_rank() -> None:
    """Be a rank: `python -m tools.faults.tracing ARGUMENTS` runs `python -m pipeline ARGUMENTS`."""
    import runpy

    install(f"rank {os.environ.get('RANK', '0')}")
    sys.argv[0] = "pipeline"
    runpy.run_module("pipeline", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    from tools.faults import tracing

    tracing.run_rank()
