"""training.profile: torch.profiler records single steps of chosen ranks; RUN/profile then has a trace, a picture and a report of each."""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import socket
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline.common import timeline
from pipeline.common.atomic_files import atomic_file
from pipeline.common.intervals import Interval, length, union, without
from pipeline.config.schema import RunConfig
from pipeline.training.callback import Callback

log = logging.getLogger("pipeline")

#: Folder of a run directory.
FOLDER = "profile"
#: Operations in a report, and beside the picture.
_OPERATIONS, _COSTS = 10, 5


class Profiler(Callback):
    """Profiles steps of a rank."""

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
        """Write the trace, the picture and the report."""
        self._folder.mkdir(exist_ok=True)
        trace = self._folder / f"step-{number:08d}-rank-{self._rank:05d}.json.gz"
        partial = trace.with_name(f".{trace.name.removesuffix('.json.gz')}.partial.json.gz")
        try:
            profiler.export_chrome_trace(str(partial))
            recorded = read(partial)
            os.replace(partial, trace)
        finally:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
        key = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = profiler.key_averages().table(sort_by=key, row_limit=_OPERATIONS, max_name_column_width=60)
        head = f"step {number}, rank {self._rank} on {socket.gethostname()}; the profiler itself takes a part of the time"
        figures = summary(recorded)
        report = trace.with_name(trace.name.replace(".json.gz", ".txt"))
        with atomic_file(report, "w", parents=False) as text:
            text.write(f"{head}\n{figures}\n\n{_OPERATIONS} most expensive operations, by their own time\n{table}\n")
        lines = [head, *str(figures).splitlines(), "", f"the {_COSTS} largest costs, by their own time", *costs(recorded)]
        with atomic_file(report.with_suffix(".html"), "w", parents=False) as html:
            html.write(picture(recorded).html(f"Step {number}, rank {self._rank}", lines))
        log.info("step %d: profile of rank %d in %s, and as a picture in .html", number, self._rank, report)


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


#: Kernels of NCCL and RCCL, and operations of gloo.
_COMMUNICATION = ("nccl", "rccl", "gloo:")
#: Annotations of other operations, which cover them, and calls that wait.
_COVERING = ("c10d::", "ProfilerStep", "Optimizer.", "DistributedDataParallel", "record_param_comms")
#: Kernels and operations of attention, and of matrix products: cuBLAS, CUTLASS, hipBLASLt, Triton's, and PyTorch's operations on a CPU.
_ATTENTION = re.compile("flash|fmha|attention|sdpa", re.IGNORECASE)
_PRODUCTS = re.compile("gemm|cutlass|nvjet|xmma|Cijk_|triton_tem|^aten::_?(add|b|badd|scaled_|grouped_)*mm$", re.IGNORECASE)


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


def read(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace file, .json.gz.

    Raises:
        OSError: it cannot be read.
    """
    with gzip.open(path, "rt", encoding="utf-8") as handle:
        return list(json.load(handle)["traceEvents"])


def summary(events: Sequence[Mapping[str, Any]]) -> StepProfile:
    """Return the figures of the events of a trace."""
    timed, kernels = _timed(events)
    compute, collectives = _busy(timed, kernels)
    device = 1 if kernels else 0
    memory = [event["args"] for event in events if event.get("name") == "[memory]" and event["args"].get("Device Type") == device]
    totals = [int(args["Total Allocated"]) for args in memory]
    start = totals[0] - int(memory[0]["Bytes"]) if memory else 0
    first, last = _window(timed)
    return StepProfile(
        "GPU" if kernels else "CPU",
        (last - first) / 1e6,
        length(compute) / 1e6,
        length(collectives) / 1e6,
        length(without(collectives, compute)) / 1e6,
        (start, max(start, *totals), totals[-1]) if memory else None,
    )


def picture(events: Sequence[Mapping[str, Any]]) -> timeline.Step:
    """Return the timeline of the events of a trace: each stream of the GPU, and where the host waits for it; of a CPU, each thread."""
    timed, kernels = _timed(events)
    rows: defaultdict[str, list[timeline.Span]] = defaultdict(list)
    if kernels:
        waits = [event for event in timed if event.get("cat") == "cuda_runtime" and "Synchronize" in event["name"]]
        rows["host"] = [timeline.Span(timeline.HOST_WAITS, *_seconds(_interval(event)), event["name"]) for event in waits]
    for event, intervals in sorted(_own_times(timed, kernels), key=lambda entry: str(entry[0].get("tid"))):
        spans = [timeline.Span(_kind(event), *_seconds(interval), event["name"]) for interval in intervals]
        rows[f"{'stream' if kernels else 'thread'} {event.get('tid')}"] += spans
    compute, collectives = _busy(timed, kernels)
    exposed = without(collectives, compute)
    idle = without([_window(timed)], union([*compute, *collectives])) if kernels else []
    return timeline.Step(_seconds(_window(timed)), list(rows.items()), [*map(_seconds, exposed)], [*map(_seconds, idle)])


def costs(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each of the operations that take most time by themselves: its time, its share of the step, how often it runs."""
    timed, kernels = _timed(events)
    took: defaultdict[str, list[float]] = defaultdict(list)
    for event, intervals in _own_times(timed, kernels):
        took[event["name"]].append(length(intervals))
    first, last = _window(timed)
    largest = sorted(((sum(times), len(times), name) for name, times in took.items()), reverse=True)[:_COSTS]
    return [f"{total / 1e3:10.2f} ms {total / (last - first):6.1%} {count:6,} x {name}" for total, count, name in largest]


def _timed(events: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """The events with a duration, and those of them that run on a GPU."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event and event.get("cat") != "Trace"]
    return timed, [event for event in timed if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]


def _busy(timed: Sequence[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]]) -> tuple[list[Interval], list[Interval]]:
    """When the device computes, and when collectives run, microseconds."""
    work = kernels or [event for event in timed if event.get("cat") == "cpu_op" and not event["name"].startswith(_COVERING)]
    compute = union(_interval(event) for event in work if not _communicates(event["name"]))
    return compute, union(_interval(event) for event in (kernels or timed) if _communicates(event["name"]))


def _own_times(
    timed: Sequence[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Sequence[Interval]]]:
    """When each kernel ran, or each operation of a CPU but not one that it calls, microseconds."""
    if kernels:
        return [(event, [_interval(event)]) for event in kernels]
    called: list[tuple[Mapping[str, Any], list[Interval]]] = []
    open_calls: defaultdict[Any, list[tuple[Mapping[str, Any], list[Interval]]]] = defaultdict(list)  # by thread
    for event in sorted(timed, key=lambda event: (float(event["ts"]), -float(event["dur"]))):
        if event.get("cat") != "cpu_op" and not _communicates(event["name"]):
            continue
        callers = open_calls[event.get("tid")]
        while callers and _interval(callers[-1][0])[1] <= event["ts"]:
            callers.pop()
        if callers:
            callers[-1][1].append(_interval(event))
        called.append((event, []))
        callers.append(called[-1])
    return [(event, without([_interval(event)], union(inner))) for event, inner in called]


def _window(timed: Sequence[Mapping[str, Any]]) -> Interval:
    """Begin of the first event and end of the last one, microseconds."""
    begins, ends = [event["ts"] for event in timed], [event["ts"] + event["dur"] for event in timed]
    return float(min(begins, default=0)), float(max(ends, default=0))


def _kind(event: Mapping[str, Any]) -> str:
    """The kind of work of an event."""
    name = event["name"]
    if _communicates(name):
        return "collectives"
    if event.get("cat") in ("gpu_memcpy", "gpu_memset"):
        return timeline.COPIES
    return timeline.ATTENTION if _ATTENTION.search(name) else timeline.PRODUCTS if _PRODUCTS.search(name) else timeline.OTHER


def _seconds(interval: Interval) -> Interval:
    """An interval that is given in microseconds."""
    return interval[0] / 1e6, interval[1] / 1e6


def _communicates(name: str) -> bool:
    """Whether a kernel or an operation is that of a collective."""
    return name.lower().startswith(_COMMUNICATION)


def _interval(event: Mapping[str, Any]) -> Interval:
    """When an event took place, microseconds."""
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])
