"""training.profile: torch.profiler records single steps of chosen ranks; RUN/profile then has a trace and a report of each."""

from __future__ import annotations

import gzip
import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.common.atomic_files import atomic_file
from pipeline.common.intervals import Interval, length, union, without
from pipeline.config.schema import RunConfig
from pipeline.training.callback import Callback

log = logging.getLogger("pipeline")

#: Folder of a run directory.
FOLDER = "profile"
#: Operations in a report.
_OPERATIONS = 10


class Profiler(Callback):
    """Profiles steps of a rank.

    Args:
        config: of the run.
        rank: of this process.
    """

    def __init__(self, config: RunConfig, rank: int) -> None:
        self._folder, self._rank = Path(config.run_dir) / FOLDER, rank
        self._steps = frozenset(config.training.profile) if rank in config.training.profile_ranks else frozenset()

    @contextmanager
    def during_step(self, number: int) -> Iterator[None]:
        """Return a context for a step, which is profiled if that is asked for. A report that cannot be written does not end the run."""
        if number not in self._steps:
            yield
            return
        _synchronize()  # the step before
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
            yield
            _synchronize()
        try:
            self._write(profiler, number)
        except OSError as error:
            log.warning("step %d: the profile was not written: %s", number, error)

    def _write(self, profiler: profile, number: int) -> None:
        """Write the trace and the report."""
        self._folder.mkdir(exist_ok=True)
        trace = self._folder / f"step-{number:08d}-rank-{self._rank:05d}.json.gz"
        partial = trace.with_name(f".{trace.name.removesuffix('.json.gz')}.partial.json.gz")
        try:
            profiler.export_chrome_trace(str(partial))
            summary = read(partial)
            os.replace(partial, trace)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=_OPERATIONS, max_name_column_width=60)
        head = f"step {number}, rank {self._rank} on {socket.gethostname()}; the profiler itself takes a part of the time"
        report = trace.with_name(trace.name.replace(".json.gz", ".txt"))
        with atomic_file(report, "w", parents=False) as handle:
            handle.write(f"{head}\n{summary}\n\n{_OPERATIONS} most expensive operations, by their own time\n{table}\n")
        log.info("step %d: profile of rank %d in %s", number, self._rank, report)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


#: Kernels of NCCL and RCCL, and operations of gloo.
_COMMUNICATION = ("nccl", "rccl", "gloo:")
#: Annotations of other operations, which cover them, and calls that wait.
_COVERING = ("c10d::", "ProfilerStep", "Optimizer.", "DistributedDataParallel", "record_param_comms")


@dataclass(frozen=True)
class StepProfile:
    """Figures of a step.

    Attributes:
        device: "GPU", or "CPU" if the trace has no kernel.
        seconds: from the first to the last event.
        compute: in which the device computes.
        communication: in which collectives run.
        exposed: in which collectives run and the device computes nothing.
        memory: of tensors on the device at the begin, at most and at the end, bytes; None if nothing was allocated.
    """

    device: str
    seconds: float
    compute: float
    communication: float
    exposed: float
    memory: tuple[int, int, int] | None

    def __str__(self) -> str:
        shares = [
            f"{name} {1e3 * seconds:.2f} ms ({seconds / self.seconds:.1%})"
            for name, seconds in (("computes", self.compute), ("communicates", self.communication), ("exposed communication", self.exposed))
        ]
        lines = [f"{1e3 * self.seconds:.2f} ms; {self.device}: {', '.join(shares)}"]
        if self.memory is not None:
            begin, peak, end = (f"{size / 1e9:.4f} GB" for size in self.memory)
            lines.append(f"memory of tensors on the {self.device}: {begin} at the begin, {peak} at most, {end} at the end")
        return "\n".join(lines)


def read(path: Path) -> StepProfile:
    """Return the figures of a trace file, .json.gz.

    Raises:
        OSError: it cannot be read.
    """
    with gzip.open(path, "rt", encoding="utf-8") as handle:
        return summary(json.load(handle)["traceEvents"])


def summary(events: Sequence[Mapping[str, Any]]) -> StepProfile:
    """Return the figures of the events of a trace."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event and event.get("cat") != "Trace"]
    kernels = [event for event in timed if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    work = kernels or [event for event in timed if event.get("cat") == "cpu_op" and not event["name"].startswith(_COVERING)]
    collectives = union(_interval(event) for event in (kernels or timed) if _communicates(event["name"]))
    compute = union(_interval(event) for event in work if not _communicates(event["name"]))
    device = 1 if kernels else 0
    memory = [event["args"] for event in events if event.get("name") == "[memory]" and event["args"].get("Device Type") == device]
    totals = [int(args["Total Allocated"]) for args in memory]
    start = totals[0] - int(memory[0]["Bytes"]) if memory else 0
    span = union([(min(begin for begin, _ in map(_interval, timed)), max(end for _, end in map(_interval, timed)))]) if timed else []
    return StepProfile(
        "GPU" if kernels else "CPU",
        length(span) / 1e6,
        length(compute) / 1e6,
        length(collectives) / 1e6,
        length(without(collectives, compute)) / 1e6,
        (start, max(start, *totals), totals[-1]) if memory else None,
    )


def _communicates(name: str) -> bool:
    """Whether a kernel or an operation is that of a collective."""
    return name.lower().startswith(_COMMUNICATION)


def _interval(event: Mapping[str, Any]) -> Interval:
    """When an event took place, microseconds."""
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])
