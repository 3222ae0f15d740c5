"""The timeline of a replayed step, as a page (common/timeline.py) and as a Chrome trace."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipeline.common import timeline
from pipeline.common.atomic_files import atomic_file
from pipeline.common.timeline import Span
from pipeline.rehearsal.analysis import Findings
from pipeline.rehearsal.replay import Placed

_KINDS = {"product": timeline.PRODUCTS, "attention": timeline.ATTENTION, "copy": timeline.COPIES}


def write(findings: Findings, path: Path) -> None:
    """Write the picture of a step, and beside it the Chrome trace, `path` with the end .json.gz.

    Args:
        findings: of the step.
        path: of the page, .html.

    Raises:
        OSError: the files cannot be written.
    """
    with atomic_file(path, "w") as handle:
        handle.write(step(findings).html("Timeline of a step", findings.lines()))
    with atomic_file(path.with_suffix(".json.gz"), "wb") as binary:
        binary.write(gzip.compress(json.dumps({"traceEvents": list(trace(findings))}).encode()))


def step(findings: Findings) -> timeline.Step:
    """Return what the picture shows: the host, the streams that compute, and the streams of collectives and copies."""
    waits = [
        Span(timeline.HOST_WAITS, wait.begin, wait.end, f"waits for {wait.wait.name} at {wait.wait.site or '?'}")
        for wait in findings.replay.waits
    ]
    streams: defaultdict[int, list[Placed]] = defaultdict(list)
    for placed in findings.replay.work:
        streams[placed.work.stream].append(placed)
    rows = [(_stream_name(work), [_span(placed) for placed in work]) for work in streams.values()]
    rows = [("host", waits), *sorted(rows, key=lambda row: (not row[0].startswith("kernels"), row[0]))]
    return timeline.Step(findings.time.window, rows, findings.time.exposed_intervals, findings.time.host_intervals)


def trace(findings: Findings) -> Iterator[dict[str, Any]]:
    """Yield the events of a Chrome trace."""
    streams = sorted({placed.work.stream for placed in findings.replay.work})
    for number, (stream, name) in enumerate([(-1, "host"), *((stream, f"stream {stream:#x}") for stream in streams)]):
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": stream, "args": {"name": name}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": 0, "tid": stream, "args": {"sort_index": number}}
    for placed in findings.replay.work:
        work = placed.work
        arguments = {"line": work.site, "queued_us": 1e6 * placed.queued, "axis": work.axis, "bytes": work.size}
        category = "gpu_memcpy" if work.kind == "copy" else "kernel"
        name = f"{work.axis} {work.name}" if work.kind == "collective" else work.name
        yield _complete(name, category, work.stream, placed.begin, placed.end, arguments)
    for waited in findings.replay.waits:
        yield _complete(f"wait for {waited.wait.name}", "cuda_runtime", -1, waited.begin, waited.end, {"line": waited.wait.site})
    for begin, end in findings.time.exposed_intervals:
        yield _complete("exposed communication", "user_annotation", -2, begin, end, {})
    for name, at, _ in findings.replay.marks:
        yield {"ph": "i", "name": name, "pid": 0, "tid": -1, "ts": 1e6 * at, "s": "p"}


def _complete(name: str, category: str, row: int, begin: float, end: float, arguments: dict[str, Any]) -> dict[str, Any]:
    """An event with a duration; a trace has microseconds."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": 0,
        "tid": row,
        "ts": 1e6 * begin,
        "dur": 1e6 * (end - begin),
        "args": arguments,
    }


def _stream_name(work: Sequence[Placed]) -> str:
    """What a stream runs."""
    axes = sorted({placed.work.axis for placed in work if placed.work.kind == "collective"})
    computes = any(placed.work.kind in ("product", "attention", "kernel", "fill") for placed in work)
    first = f"kernels, stream {work[0].work.stream:#x}" if computes else f"stream {work[0].work.stream:#x}"
    return f"{', '.join(axes)}, {first}" if axes and not computes else first


def _span(placed: Placed) -> Span:
    """Work as a bar."""
    work = placed.work
    kind = f"{timeline.COLLECTIVES}{work.axis}" if work.kind == "collective" else _KINDS.get(work.kind, timeline.OTHER)
    return Span(kind, placed.begin, placed.end, f"{work.name} at {work.site or '?'}")
