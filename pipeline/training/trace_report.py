"""What a Chrome trace of torch.profiler says of a step: busy time, communication that nothing hides, and memory. Imports no torch."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.common.intervals import Interval, length, union, without

#: Kernels of NCCL and RCCL, and operations of gloo.
_COMMUNICATION = ("nccl", "rccl", "gloo:")
#: Annotations of other operations, which cover them, and calls that wait.
_COVERING = ("c10d::", "ProfilerStep", "Optimizer.", "DistributedDataParallel", "record_param_comms")


@dataclass(frozen=True)
class Summary:
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


def read(path: Path) -> Summary:
    """Return the figures of a trace file, .json.gz.

    Raises:
        OSError: it cannot be read.
    """
    with gzip.open(path, "rt", encoding="utf-8") as handle:
        return summary(json.load(handle)["traceEvents"])


def summary(events: Sequence[Mapping[str, Any]]) -> Summary:
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
    return Summary(
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
